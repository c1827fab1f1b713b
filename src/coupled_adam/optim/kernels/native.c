/* Coupled Adam's update of a matrix [V, H] on a CPU, in two passes over memory.
 *
 * The first sums the squares of each column of the gradient and, where nothing has to be known before,
 * moves the first moment. The second moves the parameter. Plain C, without a header of Python's or
 * torch's: called through ctypes by native.py, which documents the arguments.
 */

#define _GNU_SOURCE /* for RTLD_DEFAULT */
#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* One library for all machines: the loops are compiled for several instruction sets, the best of
 * which is taken when it is loaded. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_CPU
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))
#define SUM_ROWS 256 /* added up in single precision, their sums in double precision */
#define MAX_THREADS 256

enum { FLOAT32, FLOAT64, BFLOAT16 };

typedef uint16_t bfloat16;

static inline float from_bfloat16(bfloat16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t mix(uint32_t x) { /* as in rounding.py, to the bit */
    x = (x ^ (x >> 16)) * 0x85ebca6b;
    x = (x ^ (x >> 13)) * 0xc2b2ae35;
    return x ^ (x >> 16);
}

static inline bfloat16 to_bfloat16_stochastically(float value, uint32_t random) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return value == value ? (bfloat16)((bits + (random >> 16)) >> 16) : 0x7fc0;
}

static inline bfloat16 to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16; /* to nearest, ties to even */
    return value == value ? (bfloat16)rounded : 0x7fc0;
}

#define SAME(x) (x)

/* Of rounding.py: the key of the step, and the place of the part in the whole matrix. */
typedef struct {
    uint32_t key, row, column;
} Noise;

typedef struct {
    int dtype;
    void *param, *grad, *exp_avg; /* exp_avg: NULL if it is not to be moved */
    int64_t param_stride, grad_stride, exp_avg_stride; /* from row to row, in elements */
    int64_t first, last, columns;
    double weight, factor, decay;
    const Noise *noise; /* NULL: round to nearest */
    void *step_size; /* [H] of the dtype that is computed in */
    double *sums;    /* [H] */
    int failed;
} Part;

#define DEFINE_KERNELS(NAME, T, WIDE, LOAD, STORE)                                               \
    ALWAYS_INLINE static void add_square_##NAME(const T *restrict g, WIDE *restrict some,        \
                                                int64_t columns) {                               \
        for (int64_t i = 0; i < columns; i++) {                                                  \
            const WIDE x = LOAD(g[i]);                                                           \
            some[i] += x * x;                                                                    \
        }                                                                                        \
    }                                                                                            \
                                                                                                 \
    ALWAYS_INLINE static void add_square_and_move_##NAME(                                        \
        const T *restrict g, WIDE *restrict some, T *restrict m, WIDE weight, int64_t columns) { \
        for (int64_t i = 0; i < columns; i++) {                                                  \
            const WIDE x = LOAD(g[i]), old = LOAD(m[i]);                                         \
            some[i] += x * x;                                                                    \
            m[i] = STORE(old + weight * (x - old));                                              \
        }                                                                                        \
    }                                                                                            \
                                                                                                 \
    ALWAYS_INLINE static void move_##NAME(T *restrict m, const T *restrict g, WIDE weight,       \
                                          WIDE factor, int64_t columns) {                        \
        for (int64_t i = 0; i < columns; i++) {                                                  \
            const WIDE old = LOAD(m[i]);                                                         \
            m[i] = STORE(old + weight * (factor * LOAD(g[i]) - old));                            \
        }                                                                                        \
    }                                                                                            \
                                                                                                 \
    ALWAYS_INLINE static void descend_##NAME(T *restrict p, const T *restrict m,                 \
                                             const WIDE *restrict step_size, WIDE decay,         \
                                             int64_t columns) {                                  \
        for (int64_t i = 0; i < columns; i++)                                                    \
            p[i] = STORE(decay * LOAD(p[i]) - step_size[i] * LOAD(m[i]));                        \
    }                                                                                            \
                                                                                                 \
    FOR_EACH_CPU static void sums_##NAME(Part *part) {                                           \
        const int64_t columns = part->columns;                                                   \
        double *restrict sums = part->sums;                                                      \
        WIDE *restrict some = calloc((size_t)columns, sizeof(WIDE));                             \
        if (some == NULL) {                                                                      \
            part->failed = 1;                                                                    \
            return;                                                                              \
        }                                                                                        \
        memset(sums, 0, (size_t)columns * sizeof(double));                                       \
        for (int64_t row = part->first; row < part->last;) {                                     \
            const int64_t stop = row + SUM_ROWS < part->last ? row + SUM_ROWS : part->last;      \
            for (; row < stop; row++) {                                                          \
                const T *g = (const T *)part->grad + row * part->grad_stride;                    \
                T *m = (T *)part->exp_avg + row * part->exp_avg_stride;                          \
                if (part->exp_avg == NULL)                                                       \
                    add_square_##NAME(g, some, columns);                                         \
                else                                                                             \
                    add_square_and_move_##NAME(g, some, m, (WIDE)part->weight, columns);         \
            }                                                                                    \
            for (int64_t i = 0; i < columns; i++) {                                              \
                sums[i] += some[i];                                                              \
                some[i] = 0;                                                                     \
            }                                                                                    \
        }                                                                                        \
        free(some);                                                                              \
    }                                                                                            \
                                                                                                 \
    FOR_EACH_CPU static void update_##NAME(Part *part) {                                         \
        for (int64_t row = part->first; row < part->last; row++) {                               \
            T *p = (T *)part->param + row * part->param_stride;                                  \
            T *m = (T *)part->exp_avg + row * part->exp_avg_stride;                              \
            if (part->grad != NULL)                                                              \
                move_##NAME(m, (const T *)part->grad + row * part->grad_stride,                  \
                            (WIDE)part->weight, (WIDE)part->factor, part->columns);              \
            descend_##NAME(p, m, part->step_size, (WIDE)part->decay, part->columns);             \
        }                                                                                        \
    }

#define DEFINE_STEP_SIZES(NAME, WIDE)                                                            \
    static void step_sizes_##NAME(WIDE *step_size, WIDE *nu, WIDE *most, const double *sums,     \
                                  int64_t columns, double beta2, double share, double scale,     \
                                  double eps, double lr) {                                       \
        for (int64_t i = 0; i < columns; i++) {                                                  \
            nu[i] = (WIDE)(beta2 * nu[i] + share * sums[i]);                                     \
            WIDE highest = nu[i];                                                                \
            if (most != NULL) { /* as torch.maximum: not a number stays so */                    \
                if (most[i] > highest || most[i] != most[i]) highest = most[i];                  \
                most[i] = highest;                                                               \
            }                                                                                    \
            step_size[i] = (WIDE)(lr / (sqrt(highest * scale) + eps));                           \
        }                                                                                        \
    }

DEFINE_STEP_SIZES(float32, float)
DEFINE_STEP_SIZES(float64, double)
DEFINE_KERNELS(float32, float, float, SAME, SAME)
DEFINE_KERNELS(float64, double, double, SAME, SAME)
DEFINE_KERNELS(bfloat16, bfloat16, float, from_bfloat16, to_bfloat16)

FOR_EACH_CPU static void update_bfloat16_stochastically(Part *part) {
    const float *restrict step_size = part->step_size;
    const float weight = part->weight, factor = part->factor, decay = part->decay;
    const Noise noise = *part->noise;
    for (int64_t row = part->first; row < part->last; row++) {
        bfloat16 *restrict p = (bfloat16 *)part->param + row * part->param_stride;
        bfloat16 *restrict m = (bfloat16 *)part->exp_avg + row * part->exp_avg_stride;
        const uint32_t key = mix(mix(noise.row + (uint32_t)row) ^ noise.key);
        if (part->grad != NULL)
            move_bfloat16(m, (const bfloat16 *)part->grad + row * part->grad_stride, weight, factor,
                          part->columns);
        for (int64_t i = 0; i < part->columns; i++) {
            const float value = decay * from_bfloat16(p[i]) - step_size[i] * from_bfloat16(m[i]);
            p[i] = to_bfloat16_stochastically(value, mix(key ^ (noise.column + (uint32_t)i)));
        }
    }
}

static void run_sums(Part *part) {
    switch (part->dtype) {
    case FLOAT32: sums_float32(part); break;
    case FLOAT64: sums_float64(part); break;
    default: sums_bfloat16(part);
    }
}

static void run_update(Part *part) {
    switch (part->dtype) {
    case FLOAT32: update_float32(part); break;
    case FLOAT64: update_float64(part); break;
    default:
        if (part->noise != NULL)
            update_bfloat16_stochastically(part);
        else
            update_bfloat16(part);
    }
}

/* Threads are those of torch's OpenMP, which would otherwise wait busily on the cores that ours need.
 * Torch makes its library's functions visible to all; where it has another, threads are started. */
typedef void Work(Part *);
typedef struct {
    Work *work;
    Part *parts;
    int count;
    int (*number)(void), (*size)(void); /* of the thread, and of threads */
} Team;

static void run_share(void *team) {
    const Team *mine = team;
    for (int i = mine->number(); i < mine->count; i += mine->size()) mine->work(&mine->parts[i]);
}

static void *run_alone(void *team) {
    const Team *mine = team;
    mine->work(mine->parts);
    return NULL;
}

static void run(Work *work, Part whole, int64_t rows, int count, Part *parts) {
    for (int i = 0; i < count; i++) {
        double *sums = parts[i].sums;
        parts[i] = whole;
        parts[i].sums = sums;
        parts[i].first = rows * i / count;
        parts[i].last = rows * (i + 1) / count;
    }
    if (count == 1) {
        work(parts);
        return;
    }
    Team team = {work, parts, count, NULL, NULL};
    void (*parallel)(void (*)(void *), void *, unsigned, unsigned);
    *(void **)&parallel = dlsym(RTLD_DEFAULT, "GOMP_parallel");
    *(void **)&team.number = dlsym(RTLD_DEFAULT, "omp_get_thread_num");
    *(void **)&team.size = dlsym(RTLD_DEFAULT, "omp_get_num_threads");
    if (parallel != NULL && team.number != NULL && team.size != NULL) {
        parallel(run_share, &team, (unsigned)count, 0);
        return;
    }
    pthread_t ids[MAX_THREADS];
    Team teams[MAX_THREADS];
    int started[MAX_THREADS] = {0};
    for (int i = 1; i < count; i++) {
        teams[i] = (Team){work, &parts[i], 1, NULL, NULL};
        started[i] = !pthread_create(&ids[i], NULL, run_alone, &teams[i]);
    }
    work(parts);
    for (int i = 1; i < count; i++) {
        if (started[i])
            pthread_join(ids[i], NULL);
        else
            work(&parts[i]);
    }
}

/* Returns 0, or 1 where there was no memory: exp_avg may then have been moved in part. */
int coupled_adam_sums(int dtype, void *grad, int64_t grad_stride, void *exp_avg,
                      int64_t exp_avg_stride, int64_t rows, int64_t columns, double weight,
                      double *sums, int threads) {
    Part whole = {.dtype = dtype,
                  .grad = grad,
                  .grad_stride = grad_stride,
                  .exp_avg = exp_avg,
                  .exp_avg_stride = exp_avg_stride,
                  .columns = columns,
                  .weight = weight};
    Part parts[MAX_THREADS];
    threads = threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads;
    double *others = NULL;
    if (threads > 1) {
        others = malloc((size_t)(threads - 1) * (size_t)columns * sizeof(double));
        if (others == NULL) threads = 1;
    }
    for (int i = 0; i < threads; i++) parts[i].sums = i ? others + (i - 1) * columns : sums;
    run(run_sums, whole, rows, threads, parts);
    int failed = parts[0].failed;
    for (int i = 1; i < threads; i++) { /* always in this order: the same bits at every call */
        failed |= parts[i].failed;
        for (int64_t j = 0; j < columns; j++) sums[j] += parts[i].sums[j];
    }
    free(others);
    return failed;
}

/* nu <- beta2 nu + share sums; then the second pass. Where sums are NULL both passes are made.
 * Returns 0, or 1 where there was no memory. */
int coupled_adam_update(int dtype, void *param, int64_t param_stride, void *grad,
                        int64_t grad_stride, void *exp_avg, int64_t exp_avg_stride, int64_t rows,
                        int64_t columns, void *exp_avg_sq, void *max_exp_avg_sq,
                        const double *sums, double beta2, double share, double scale,
                        double eps, double lr, double weight, double factor, double decay,
                        const Noise *noise, int threads) {
    void *step_size = malloc((size_t)columns * sizeof(double));
    double *own = sums == NULL ? malloc((size_t)columns * sizeof(double)) : NULL;
    if (step_size == NULL || (sums == NULL && own == NULL) ||
        (own != NULL && coupled_adam_sums(dtype, grad, grad_stride, exp_avg, exp_avg_stride, rows,
                                          columns, weight, own, threads))) {
        free(step_size);
        free(own);
        return 1;
    }
    if (own != NULL) {
        sums = own;
        grad = NULL; /* the first moment has been moved */
    }
    if (dtype == FLOAT64)
        step_sizes_float64(step_size, exp_avg_sq, max_exp_avg_sq, sums, columns, beta2, share,
                           scale, eps, lr);
    else
        step_sizes_float32(step_size, exp_avg_sq, max_exp_avg_sq, sums, columns, beta2, share,
                           scale, eps, lr);
    Part whole = {.dtype = dtype,
                  .param = param,
                  .param_stride = param_stride,
                  .grad = grad,
                  .grad_stride = grad_stride,
                  .exp_avg = exp_avg,
                  .exp_avg_stride = exp_avg_stride,
                  .columns = columns,
                  .weight = weight,
                  .factor = factor,
                  .decay = decay,
                  .noise = noise,
                  .step_size = step_size};
    Part parts[MAX_THREADS];
    threads = threads < 1 ? 1 : threads > MAX_THREADS ? MAX_THREADS : threads;
    run(run_update, whole, rows, threads, parts);
    free(step_size);
    free(own);
    return 0;
}
