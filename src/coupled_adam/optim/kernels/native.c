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

#define ALWAYS_INLINE inline __attribute__((always_inline))
#define ROWS 4        /* rows that measure and center work on at a time; apply works on 2 */
#define BLOCK 1024    /* bytes of a row that both loops of a pass work on before they go on */
#define SUM_ROWS 128  /* times ROWS are summed in single precision before double precision */
/* Bytes by which cache lines are prefetched before they are used, where measure and apply use them. */
#define MEASURE_AHEAD 4096
#define APPLY_AHEAD 1024
#define MAX_THREADS 256

enum { FLOAT32, FLOAT64, BFLOAT16 };
enum { GRAD, MOMENT, PARAM, UPDATE }; /* the kinds of rows */

/* One update of one matrix, filled in by native.py. Strides are between rows, in elements. */
typedef struct {
    int32_t dtype, threads;
    int64_t rows, columns;
    void *param, *grad, *exp_avg;
    int64_t param_stride, grad_stride, exp_avg_stride;
    void *exp_avg_sq, *max_exp_avg_sq; /* [H]; the maximum is NULL without amsgrad */
    double *sums;                      /* [H]: written by measure, read by apply */
    void *row_sums;                    /* [V]: sums of squares, written by measure; NULL if not needed */
    /* r [V]. If it is not NULL, measure writes the rows' weights: r'^-exponent, where r' is beta2 r +
     * row_share row_sums, and 0 where that is 0; and apply makes r' the new r. Otherwise center and
     * apply read the weights; NULL for 1. */
    void *exp_avg_sq_row;
    void *weights;
    double row_share, exponent;
    /* With zero_sum: the sums over the rows of the updates, which are weights times the first moment or,
     * without one, times factor times the gradient, [H]. Written by measure (for a factor of 1) or by
     * center, read by apply. NULL without zero_sum. */
    double *moment_sums;
    double active;         /* the number of weights that are not 0: written with them, read by apply */
    double weight;         /* 1 - beta1; exp_avg is NULL if this is 1 */
    int32_t update_moment; /* measure updates the first moment, otherwise center or apply does */
    double beta2;
    /* The following fields are not for measure. nu becomes beta2 nu + share sums. The step size is
     * lr / (sqrt(scale nu) + eps), where lr is already divided by 1 - beta1^t and scale by 1 - beta2^t;
     * apply multiplies lr by the mean of r to the power of exponent if exp_avg_sq_row is not NULL, and
     * otherwise that has been done. factor multiplies the gradient, decay the parameter. */
    int32_t stochastic;
    double share, scale, eps, lr, factor, decay, vocab_size;
    uint32_t noise_key, noise_row, noise_column; /* see rounding.py */
} Update;

/* One thread's share of the rows. */
typedef struct {
    const Update *update;
    int64_t first, last;           /* rows */
    double *sums, *update_sums;   /* [H], NULL if not needed */
    const void *step_size, *mean; /* for apply; see place in native_passes.h */
    double active;
    int64_t padded;               /* columns, rounded up to a multiple of 64 */
    double *memory;               /* 6 times as many numbers, to work with */
} Share;

typedef void Pass(Share *);
typedef struct {
    Pass *measure, *center, *apply;
    void (*step_sizes)(const Update *, void *step_size, void *mean);
} Passes;

static const uint32_t EVEN_COLUMNS[16] __attribute__((aligned(64))) = {
    0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};

static inline uint32_t mix(uint32_t x) { /* the same hash as in rounding.py */
    x = (x ^ (x >> 16)) * 0x85ebca6b;
    x = (x ^ (x >> 13)) * 0xc2b2ae35;
    return x ^ (x >> 16);
}

/* The passes are compiled for several instruction sets, so that one library is fast on all machines.
 * (target_clones would split the vectors before it knows the instruction set.) */
#define TARGET(x) x##_baseline
#define VECTOR_BYTES 16
#include "native_dtypes.h"
#if defined(__x86_64__)
#pragma GCC push_options
#pragma GCC target("avx2")
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#define TARGET(x) x##_avx2
#define VECTOR_BYTES 32
#include "native_dtypes.h"
#pragma clang attribute pop
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f")
#pragma clang attribute push(__attribute__((target("avx512f"))), apply_to = function)
#define TARGET(x) x##_avx512
#define VECTOR_BYTES 64
#include "native_dtypes.h"
#pragma clang attribute pop
#pragma GCC pop_options
static const Passes *const PASSES[] = {passes_baseline, passes_avx2, passes_avx512};
#else
static const Passes *const PASSES[] = {passes_baseline};
#endif

/* The best instruction set of this machine, as an index of PASSES. */
int coupled_adam_instructions = 0;

__attribute__((constructor)) static void choose_instructions(void) {
#if defined(__x86_64__)
    __builtin_cpu_init();
    coupled_adam_instructions = __builtin_cpu_supports("avx512f") ? 2 : __builtin_cpu_supports("avx2") ? 1 : 0;
#endif
}

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
        /* All of torch's threads (0), as in torch's own loops: for fewer, the runtime would end the rest,
         * and the next loop of torch would have to start them again. */
        openmp_parallel(run_in_openmp, &team, 0, 0);
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

/* Divide the rows among the threads. Each gets memory for 8 vectors over the columns, of which the last
 * two are for its sums; 2 more are left at the start. Returns the memory, or NULL if there is none. */
static double *split(const Update *u, Share *shares, int *count) {
    *count = u->threads < 1 ? 1 : u->threads > MAX_THREADS ? MAX_THREADS : u->threads;
    const int64_t padded = (u->columns + 63) / 64 * 64;
    double *memory = aligned_alloc(64, (size_t)(2 + 8 * *count) * (size_t)padded * sizeof(double) + 64);
    for (int i = 0; memory != NULL && i < *count; i++)
        shares[i] = (Share){.update = u,
                            .first = u->rows * i / *count,
                            .last = u->rows * (i + 1) / *count,
                            .padded = padded,
                            .memory = memory + (2 + 8 * i) * padded};
    return memory;
}

/* The size of the struct, which native.py compares with its own to detect another version. */
int64_t coupled_adam_update_size(void) { return sizeof(Update); }

/* Run a pass that sums over the rows, and add up the sums of all threads. Returns 1 if memory could not
 * be allocated. */
static int sum(Pass *pass, Update *u, double *sums, double *update_sums) {
    Share shares[MAX_THREADS];
    int count;
    double *memory = split(u, shares, &count);
    if (memory == NULL) return 1;
    for (int i = 0; i < count; i++) {
        double *own = shares[i].memory + 6 * shares[i].padded;
        if (sums != NULL) shares[i].sums = i ? own : sums;
        if (update_sums != NULL) shares[i].update_sums = i ? own + shares[i].padded : update_sums;
    }
    run(pass, shares, count);
    double active = shares[0].active;
    for (int i = 1; i < count; i++) { /* in a fixed order, so that results are reproducible */
        active += shares[i].active;
        for (int64_t j = 0; sums != NULL && j < u->columns; j++) sums[j] += shares[i].sums[j];
        for (int64_t j = 0; update_sums != NULL && j < u->columns; j++)
            update_sums[j] += shares[i].update_sums[j];
    }
    if (sums != NULL && u->exp_avg_sq_row != NULL) u->active = active;
    free(memory);
    return 0;
}

static const Passes *passes(const Update *u) { return &PASSES[coupled_adam_instructions][u->dtype]; }

/* All of these return 0 on success, or 1 if memory could not be allocated; nothing has been changed
 * then. */

/* Write sums, and row_sums, weights, active and moment_sums as described above. */
int coupled_adam_measure(Update *u) {
    const int known = u->exp_avg == NULL || u->update_moment; /* whether the updates are */
    return sum(passes(u)->measure, u, u->sums, known ? u->moment_sums : NULL);
}

/* Update the first moment unless measure has, and write moment_sums. */
int coupled_adam_center(Update *u) { return sum(passes(u)->center, u, NULL, u->moment_sums); }

/* Make r' the new r, as measure has computed it for the weights; return the sum over all rows. */
static double update_rows(const Update *u) {
    double total = 0;
    for (int64_t i = 0; i < u->rows; i++)
        if (u->dtype == FLOAT64) {
            double *r = (double *)u->exp_avg_sq_row + i;
            total += *r = u->beta2 * *r + u->row_share * ((const double *)u->row_sums)[i];
        } else {
            float *r = (float *)u->exp_avg_sq_row + i;
            total += *r = (float)(u->beta2 * *r + u->row_share * ((const float *)u->row_sums)[i]);
        }
    return total;
}

/* Update r, nu and its maximum, the first moment unless measure or center has, and the parameter. */
int coupled_adam_apply(Update *u) {
    Share shares[MAX_THREADS];
    int count;
    double *step_size = split(u, shares, &count);
    if (step_size == NULL) return 1;
    double *mean = step_size + shares[0].padded;
    memset(step_size, 0, 2 * (size_t)shares[0].padded * sizeof(double));
    if (u->exp_avg_sq_row != NULL) u->lr *= pow(update_rows(u) / u->active, u->exponent);
    passes(u)->step_sizes(u, step_size, mean);
    for (int i = 0; i < count; i++) shares[i].step_size = step_size, shares[i].mean = mean;
    run(passes(u)->apply, shares, count);
    free(step_size);
    return 0;
}
