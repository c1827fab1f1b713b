/* Coupled Adam's update of a matrix [V, H] on a CPU, in two passes over memory.
 *
 * coupled_adam_measure sums the squared gradient over each column. It also updates the first
 * moment, unless the gradient still has to be scaled or the step may be skipped. Python then adds
 * the sums of all ranks. coupled_adam_apply computes the step size of each column from the sums, and
 * updates the parameter. This is plain C that needs no header of Python or torch; native.py calls it
 * through ctypes. The passes themselves are in native_passes.h.
 */

#define _GNU_SOURCE /* for RTLD_DEFAULT */
#include <dlfcn.h>
#include <math.h>
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

/* The passes are compiled for several instruction sets. The best one is chosen when the library is
 * loaded, so that one library is fast on all machines. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_CPU
#endif

/* Tell the compiler that parameter, gradient and first moment do not overlap in memory. */
#if defined(__clang__)
#define NO_ALIASES _Pragma("clang loop vectorize(assume_safety)")
#else
#define NO_ALIASES _Pragma("GCC ivdep")
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))
#define BLOCK 128    /* columns whose cache lines are prefetched together */
#define AHEAD 1024   /* bytes by which cache lines are prefetched ahead of their use */
#define SUM_ROWS 256 /* rows summed in single precision before they are added in double precision */
#define MAX_THREADS 256

enum { FLOAT32, FLOAT64, BFLOAT16 };

/* One update of one matrix, filled in by native.py. Strides are between rows, in elements. */
typedef struct {
    int32_t dtype, threads;
    int64_t rows, columns;
    void *param, *grad, *exp_avg;
    int64_t param_stride, grad_stride, exp_avg_stride;
    void *exp_avg_sq, *max_exp_avg_sq; /* [H]; the maximum is NULL without amsgrad */
    double *sums;                      /* [H]: written by measure, read by apply */
    /* With row_exponent, measure writes row_sums [V]. Unless exp_avg_sq_row (r) is NULL, it also
     * updates r with beta2 and row_share, and writes weights = r^-exponent [V]; apply reads these. */
    void *row_sums, *exp_avg_sq_row, *weights;
    /* apply multiplies lr by the mean of nu, to the power of exponent. */
    double row_share, exponent;
    /* With zero_sum: the sums over the rows of weights times the first moment, [H]. Written by measure
     * or by center, read by apply. NULL without zero_sum. */
    double *moment_sums;
    double weight;                     /* 1 - beta1 */
    int32_t update_moment;             /* measure updates the first moment, otherwise apply does */
    double beta2;
    /* The following fields are for apply only. nu becomes beta2 nu + share sums. The step size is
     * lr / (sqrt(scale nu) + eps), where lr is already divided by 1 - beta1^t and scale by 1 - beta2^t.
     * factor multiplies the gradient, decay the parameter. */
    int32_t stochastic;
    double share, scale, eps, lr, factor, decay, vocab_size;
    uint32_t noise_key, noise_row, noise_column; /* see rounding.py */
} Update;

/* One thread's share of the rows. */
typedef struct {
    const Update *update;
    int64_t first, last; /* rows */
    double *sums, *moment_sums;
    const void *step_size, *mean;
    int failed;
} Share;

/* How many streams of rows a thread reads at a time: 2, or 4 with prefetching. Measured: on Intel
 * processors two take 1.1 times as long as four, on AMD processors four take 1.2 times as long as two.
 * The results are bit-identical. */
int coupled_adam_streams = 2;

__attribute__((constructor)) static void choose_streams(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_is("intel")) coupled_adam_streams = 4;
#endif
}

typedef uint16_t bfloat16;

static inline float from_bfloat16(bfloat16 x) {
    uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline bfloat16 to_bfloat16(float value) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16; /* to nearest, ties to even */
    return value == value ? (bfloat16)rounded : 0x7fc0;
}

static inline bfloat16 to_bfloat16_stochastically(float value, uint32_t random) {
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return value == value ? (bfloat16)((bits + (random >> 16)) >> 16) : 0x7fc0;
}

static inline uint32_t mix(uint32_t x) { /* the same hash as in rounding.py */
    x = (x ^ (x >> 16)) * 0x85ebca6b;
    x = (x ^ (x >> 13)) * 0xc2b2ae35;
    return x ^ (x >> 16);
}

#define T float
#define WIDE float
#define SQRT sqrtf
#define LOAD(x) (x)
#define STORE(x) (x)
#define STORE_STOCHASTICALLY(x, random) (x)
#define HAS_STOCHASTIC 0
#define NAME(x) x##_float32
#include "native_passes.h"

#define T double
#define WIDE double
#define SQRT sqrt
#define LOAD(x) (x)
#define STORE(x) (x)
#define STORE_STOCHASTICALLY(x, random) (x)
#define HAS_STOCHASTIC 0
#define NAME(x) x##_float64
#include "native_passes.h"

#define T bfloat16
#define WIDE float
#define SQRT sqrtf
#define LOAD(x) from_bfloat16(x)
#define STORE(x) to_bfloat16(x)
#define STORE_STOCHASTICALLY(x, random) to_bfloat16_stochastically(x, random)
#define HAS_STOCHASTIC 1
#define NAME(x) x##_bfloat16
#include "native_passes.h"

typedef void Pass(Share *);
static Pass *const MEASURE[] = {measure_float32, measure_float64, measure_bfloat16};
static Pass *const CENTER[] = {center_float32, center_float64, center_bfloat16};
static Pass *const APPLY[] = {apply_float32, apply_float64, apply_bfloat16};
typedef void StepSizes(const Update *, void *, void *);
static StepSizes *const STEP_SIZES[] = {step_sizes_float32, step_sizes_float64,
                                        step_sizes_bfloat16};

/* Use the threads of torch's OpenMP runtime: they spin while they wait, and would compete with threads
 * of our own. Torch loads the runtime with its symbols visible to other libraries; if they are not, we
 * start threads ourselves. */
static void (*openmp_parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*openmp_thread)(void), (*openmp_threads)(void);

__attribute__((constructor)) static void find_openmp(void) {
    *(void **)&openmp_thread = dlsym(RTLD_DEFAULT, "omp_get_thread_num");
    *(void **)&openmp_threads = dlsym(RTLD_DEFAULT, "omp_get_num_threads");
    if (openmp_thread != NULL && openmp_threads != NULL)
        *(void **)&openmp_parallel = dlsym(RTLD_DEFAULT, "GOMP_parallel");
}

typedef struct {
    Pass *pass;
    Share *shares;
    int count;
} Team;

static void run_in_openmp(void *argument) {
    const Team *team = argument;
    for (int i = openmp_thread(); i < team->count; i += openmp_threads())
        team->pass(&team->shares[i]);
}

static void *run_in_thread(void *argument) {
    const Team *team = argument;
    team->pass(team->shares);
    return NULL;
}

static void run(Pass *pass, Share *shares, int count) {
    if (count == 1) {
        pass(shares);
        return;
    }
    if (openmp_parallel != NULL) {
        Team team = {pass, shares, count};
        openmp_parallel(run_in_openmp, &team, (unsigned)count, 0);
        return;
    }
    pthread_t ids[MAX_THREADS];
    Team teams[MAX_THREADS];
    int started[MAX_THREADS] = {0};
    for (int i = 1; i < count; i++) {
        teams[i] = (Team){pass, &shares[i], 1};
        started[i] = !pthread_create(&ids[i], NULL, run_in_thread, &teams[i]);
    }
    pass(shares);
    for (int i = 1; i < count; i++) {
        if (started[i])
            pthread_join(ids[i], NULL);
        else
            pass(&shares[i]);
    }
}

static int split(const Update *u, Share *shares) {
    const int count = u->threads < 1 ? 1 : u->threads > MAX_THREADS ? MAX_THREADS : u->threads;
    for (int i = 0; i < count; i++)
        shares[i] = (Share){.update = u, .first = u->rows * i / count, .last = u->rows * (i + 1) / count};
    return count;
}

/* The size of the struct, which native.py compares with its own to detect another version. */
int64_t coupled_adam_update_size(void) { return sizeof(Update); }

/* Run a pass that sums over the rows, and add up the sums of all threads. Returns 1 if memory could not
 * be allocated. */
static int sum(Pass *pass, Update *u) {
    Share shares[MAX_THREADS];
    const int count = split(u, shares);
    const int64_t each = u->moment_sums ? 2 * u->columns : u->columns;
    double *others = NULL;
    if (count > 1) {
        others = malloc((size_t)(count - 1) * (size_t)each * sizeof(double) + 1);
        if (others == NULL) return 1;
    }
    for (int i = 0; i < count; i++) {
        shares[i].sums = i ? others + (i - 1) * each : u->sums;
        if (u->moment_sums) shares[i].moment_sums = i ? shares[i].sums + u->columns : u->moment_sums;
    }
    run(pass, shares, count);
    int failed = shares[0].failed;
    for (int i = 1; i < count; i++) { /* in a fixed order, so that results are reproducible */
        failed |= shares[i].failed;
        for (int64_t j = 0; pass != CENTER[u->dtype] && j < u->columns; j++)
            u->sums[j] += shares[i].sums[j];
        for (int64_t j = 0; u->moment_sums && j < u->columns; j++)
            u->moment_sums[j] += shares[i].moment_sums[j];
    }
    free(others);
    return failed;
}

/* Write u->sums. Returns 0 on success, or 1 if memory could not be allocated; the first moment may then
 * have been updated in part. */
int coupled_adam_measure(Update *u) { return sum(MEASURE[u->dtype], u); }

/* Update the first moment unless measure has, and write u->moment_sums. Returns as measure does. */
int coupled_adam_center(Update *u) { return sum(CENTER[u->dtype], u); }

/* Update nu and its maximum, the first moment unless measure has done so, and the parameter. Returns 0
 * on success, or 1 if memory could not be allocated; nothing has been changed then. */
int coupled_adam_apply(Update *u) {
    double *vectors = malloc(2 * (size_t)u->columns * sizeof(double) + 1); /* + 1 for zero columns */
    if (vectors == NULL) return 1;
    void *step_size = vectors, *mean = vectors + u->columns;
    STEP_SIZES[u->dtype](u, step_size, mean);
    Share shares[MAX_THREADS];
    const int count = split(u, shares);
    for (int i = 0; i < count; i++) shares[i].step_size = step_size, shares[i].mean = mean;
    run(APPLY[u->dtype], shares, count);
    free(vectors);
    return 0;
}
