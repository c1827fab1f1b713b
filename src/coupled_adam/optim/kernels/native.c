/* Coupled Adam's update of a matrix [V, H] on a CPU, in two passes over memory.
 *
 * coupled_adam_measure sums the squares of each column of the gradient and, where nothing has to be
 * known before, updates the first moment. coupled_adam_apply makes of the sums the step size of each
 * column and updates the parameter. Plain C, without a header of Python's or torch's: native.py calls it
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

/* One library for all machines: the passes are compiled for several instruction sets, of which the
 * best is chosen when the library is loaded. */
#if defined(__x86_64__) && defined(__linux__) && defined(__GLIBC__) && !defined(__clang__)
#define FOR_EACH_CPU __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_CPU
#endif

/* Parameter, gradient and first moment lie apart, which the compiler cannot know. */
#if defined(__clang__)
#define NO_ALIASES _Pragma("clang loop vectorize(assume_safety)")
#else
#define NO_ALIASES _Pragma("GCC ivdep")
#endif

#define ALWAYS_INLINE inline __attribute__((always_inline))
#define BLOCK 128    /* columns whose lines are requested together */
#define AHEAD 1024   /* bytes by which lines are requested ahead of their use */
#define SUM_ROWS 256 /* summed in single precision; their sums are summed in double precision */
#define MAX_THREADS 256

enum { FLOAT32, FLOAT64, BFLOAT16 };

/* What native.py fills in. Strides are from row to row, in elements. */
typedef struct {
    int32_t dtype, threads;
    int64_t rows, columns;
    void *param, *grad, *exp_avg;
    int64_t param_stride, grad_stride, exp_avg_stride;
    void *exp_avg_sq, *max_exp_avg_sq; /* [H]; the maximum NULL without amsgrad */
    double *sums;                      /* [H]: written by measure, read by apply */
    double weight;                     /* 1 - beta1 */
    int32_t update_moment;             /* in measure; otherwise in apply */
    /* From here on for apply. nu <- beta2 nu + share sums; scale: on nu, below the root; lr: divided by
     * 1 - beta1^t; factor: on the gradient; decay: on the parameter. */
    int32_t stochastic;
    double beta2, share, scale, eps, lr, factor, decay;
    uint32_t noise_key, noise_row, noise_column; /* see rounding.py */
} Update;

/* What one thread does of it. */
typedef struct {
    const Update *update;
    int64_t first, last; /* rows */
    double *sums;
    const void *step_size;
    int failed;
} Share;

/* How many streams of rows a thread reads at a time: 2, or 4 with lines requested ahead. Measured: four
 * are best on Intel's processors, where two take 1.1 of the time, and two on AMD's, where four take 1.2. The
 * results are the same bits. */
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

static inline uint32_t mix(uint32_t x) { /* as in rounding.py, to the bit */
    x = (x ^ (x >> 16)) * 0x85ebca6b;
    x = (x ^ (x >> 13)) * 0xc2b2ae35;
    return x ^ (x >> 16);
}

#define T float
#define WIDE float
#define LOAD(x) (x)
#define STORE(x) (x)
#define STORE_STOCHASTICALLY(x, random) (x)
#define HAS_STOCHASTIC 0
#define NAME(x) x##_float32
#include "native_passes.h"

#define T double
#define WIDE double
#define LOAD(x) (x)
#define STORE(x) (x)
#define STORE_STOCHASTICALLY(x, random) (x)
#define HAS_STOCHASTIC 0
#define NAME(x) x##_float64
#include "native_passes.h"

#define T bfloat16
#define WIDE float
#define LOAD(x) from_bfloat16(x)
#define STORE(x) to_bfloat16(x)
#define STORE_STOCHASTICALLY(x, random) to_bfloat16_stochastically(x, random)
#define HAS_STOCHASTIC 1
#define NAME(x) x##_bfloat16
#include "native_passes.h"

typedef void Pass(Share *);
static Pass *const MEASURE[] = {measure_float32, measure_float64, measure_bfloat16};
static Pass *const APPLY[] = {apply_float32, apply_float64, apply_bfloat16};
typedef void StepSizes(const Update *, void *);
static StepSizes *const STEP_SIZES[] = {step_sizes_float32, step_sizes_float64,
                                        step_sizes_bfloat16};

/* Threads are those of torch's OpenMP; others would compete with them, as they wait busily. Torch makes
 * its OpenMP's functions visible to all; where they are not, threads are started. */
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
        shares[i] = (Share){u, u->rows * i / count, u->rows * (i + 1) / count, NULL, NULL, 0};
    return count;
}

/* The size of the record, by which native.py sees that it has the same idea of it. */
int64_t coupled_adam_update_size(void) { return sizeof(Update); }

/* Write u->sums. Returns 0, or 1 where there was no memory: the first moment may then have been
 * updated in part. */
int coupled_adam_measure(Update *u) {
    Share shares[MAX_THREADS];
    const int count = split(u, shares);
    double *others = NULL;
    if (count > 1) {
        others = malloc((size_t)(count - 1) * (size_t)u->columns * sizeof(double) + 1);
        if (others == NULL) return 1;
    }
    for (int i = 0; i < count; i++) shares[i].sums = i ? others + (i - 1) * u->columns : u->sums;
    run(MEASURE[u->dtype], shares, count);
    int failed = shares[0].failed;
    for (int i = 1; i < count; i++) { /* always in this order: the same bits at every call */
        failed |= shares[i].failed;
        for (int64_t j = 0; j < u->columns; j++) u->sums[j] += shares[i].sums[j];
    }
    free(others);
    return failed;
}

/* Update nu and its maximum, the first moment unless measure has, and the parameter. Returns 0, or 1
 * where there was no memory, and nothing has been changed. */
int coupled_adam_apply(Update *u) {
    void *step_size = malloc((size_t)u->columns * sizeof(double) + 1); /* also of no columns */
    if (step_size == NULL) return 1;
    STEP_SIZES[u->dtype](u, step_size);
    Share shares[MAX_THREADS];
    const int count = split(u, shares);
    for (int i = 0; i < count; i++) shares[i].step_size = step_size;
    run(APPLY[u->dtype], shares, count);
    free(step_size);
    return 0;
}
