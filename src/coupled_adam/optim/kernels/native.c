/* Coupled Adam's and LEAN's update of a matrix [V, H] on a CPU.
 *
 * Coupled Adam takes two passes over memory. coupled_adam_sum_squares sums the squared gradient over
 * each column, and also updates the first moment, unless the gradient still has to be scaled or the
 * step may be skipped; Python then adds the sums of all ranks; coupled_adam_apply computes the step size
 * of each column and updates the parameter. coupled_adam_lean is LEAN in one pass. The formulas are in
 * reference.py, the passes themselves in native_passes.h. This is plain C that needs no header of Python
 * or torch; native.py calls it through ctypes.
 */

#define _GNU_SOURCE /* for RTLD_DEFAULT */
#include <dlfcn.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define ALWAYS_INLINE inline __attribute__((always_inline))
#define ROWS 4        /* rows that sum_squares and lean work on at a time; apply works on 2 */
#define SUM_ROWS 128  /* times so many rows are summed in single precision before double precision */
/* Bytes by which cache lines are prefetched before they are used. */
#define SUM_AHEAD 4096
#define APPLY_AHEAD 1024
#define LEAN_AHEAD 3072
#define FAR_AHEAD 4096 /* of each run of rows that do not lie side by side */
#define MAX_THREADS 256

enum { FLOAT32, FLOAT64, BFLOAT16 };
/* Rows; LEAN also sums the squares of the next row's gradient and moment. */
enum { GRAD, MOMENT, PARAM, NEXT, NEXT_MOMENT, KINDS };
enum { SCALE, MEAN, UPDATES, SQUARES, VECTORS_OF_LEAN }; /* LEAN's vectors over the columns */

/* One update of one matrix, filled in by native.py. Strides are between rows, in elements. */
typedef struct {
    int32_t dtype, threads;
    int64_t rows, columns;
    void *param, *grad, *exp_avg; /* exp_avg is NULL without momentum */
    int64_t param_stride, grad_stride, exp_avg_stride;
    void *exp_avg_sq, *max_exp_avg_sq; /* [H]; the maximum is NULL without amsgrad */
    double weight;                     /* 1 - beta1 */
    double beta2, scale, eps, lr;      /* the step size is lr / (sqrt(scale nu) + eps) */
    double factor, decay;              /* of the gradient, of the parameter */
    int32_t stochastic;
    uint32_t noise_key, noise_row, noise_column; /* see rounding.py */
    /* Coupled Adam: nu becomes beta2 nu + share sums. */
    int32_t update_moment; /* sum_squares updates the first moment, otherwise apply does */
    double share;
    /* Written by sum_squares, [H], read by apply; written by lean, [2 H + 1], as in reference.py. */
    double *sums;
    /* LEAN: r becomes beta2 r + row_share times a row's sum of squares, and q is limit_scale times the mean
     * square of its moment, over moment_correction, in the columns' units. The row's weight is
     * min((r / row_correction / rho)^-exponent, largest_step / root(q)). If r is NULL, the weights are
     * given. */
    void *row_exp_avg_sq, *weights, *mean_update; /* [V], [V], [H]; the last is NULL without zero_sum */
    double row_share, row_correction, moment_correction, nu_correction, limit_scale;
    double exponent, log_limit, largest_step;
    int32_t finish;     /* whether lean updates nu and mean_update from its sums */
    /* LEAN of a sparse gradient: which row of param and r each row of grad belongs to, and the step in
     * which each of them had its last gradient; NULL if grad has all rows. */
    const int64_t *touched;
    int32_t *row_step;
    int64_t *row_count; /* how many rows of the table move, to which lean adds those that begin to */
    int32_t step;
    double log_beta2;
} Update;

/* A sparse gradient's rows in the order of their numbers, and the sum of those with one number. */
typedef struct {
    int32_t dtype, threads;
    int64_t sums, columns;                 /* how many rows there are of the sums */
    const int64_t *order, *first;          /* sum i is of the rows order[first[i]], ..., order[first[i + 1] - 1] */
    const void *values;
    void *out; /* [sums, columns] */
} Duplicates;

/* One thread's share of the rows. */
typedef struct {
    const Update *update;
    int64_t first, last;   /* rows */
    double *sums;          /* [H], or lean's [2 H + 1] */
    const void *step_size; /* for apply; see place in native_passes.h */
    int64_t padded;        /* columns, rounded up to a multiple of 64 */
    double *memory;        /* 8 times as many numbers, to work with */
} Share;

typedef void Pass(Share *);
typedef void Add(const Duplicates *, int64_t begin, int64_t end);
typedef struct {
    Add *add;
    Pass *sum_squares, *apply, *lean;
    void (*step_sizes)(const Update *, void *step_size);
    void (*finish)(const Update *);
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
 * of our own. Torch loads the runtime with its symbols visible to other libraries; if they are not, this
 * thread does it all. */
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

static void run(Pass *pass, Share *shares, int count) {
    if (count > 1 && openmp_parallel != NULL) {
        Team team = {pass, shares, count};
        /* All of torch's threads (0), as in torch's own loops: for fewer, the runtime would end the rest,
         * and the next loop of torch would have to start them again. */
        openmp_parallel(run_in_openmp, &team, 0, 0);
        return;
    }
    for (int i = 0; i < count; i++) pass(&shares[i]);
}

/* Divide the rows among the threads. Each gets memory for 8 vectors over the columns, and for its sums;
 * one more vector is left at the start. Returns the memory, or NULL if there is none. */
static double *split(const Update *u, Share *shares, int *count) {
    *count = u->threads < 1 ? 1 : u->threads > MAX_THREADS ? MAX_THREADS : u->threads;
    const int64_t padded = (u->columns + 63) / 64 * 64, each = 11 * padded + 64;
    double *memory = aligned_alloc(64, (size_t)(padded + *count * each) * sizeof(double));
    for (int i = 0; memory != NULL && i < *count; i++) {
        double *own = memory + padded + i * each;
        shares[i] = (Share){.update = u,
                            .first = u->rows * i / *count,
                            .last = u->rows * (i + 1) / *count,
                            .padded = padded,
                            .memory = own,
                            .sums = i ? own + 8 * padded : u->sums};
    }
    return memory;
}

/* The size of the struct, which native.py compares with its own to detect another version. */
int64_t coupled_adam_update_size(void) { return sizeof(Update); }

/* Run a pass that sums over the rows, and add up the sums of all threads. */
static int sum(Pass *pass, Update *u, int64_t size) {
    Share shares[MAX_THREADS];
    int count;
    double *memory = split(u, shares, &count);
    if (memory == NULL) return 1;
    run(pass, shares, count);
    for (int i = 1; i < count; i++) /* in a fixed order, so that results are reproducible */
        for (int64_t j = 0; j < size; j++) u->sums[j] += shares[i].sums[j];
    free(memory);
    return 0;
}

static const Passes *passes(const Update *u) { return &PASSES[coupled_adam_instructions][u->dtype]; }

/* All of these return 0 on success, or 1 if memory could not be allocated; nothing has been changed
 * then. */

/* Write sums. */
int coupled_adam_sum_squares(Update *u) { return sum(passes(u)->sum_squares, u, u->columns); }

/* Update nu and its maximum, the first moment unless sum_squares has, and the parameter. */
int coupled_adam_apply(Update *u) {
    Share shares[MAX_THREADS];
    int count;
    double *step_size = split(u, shares, &count);
    if (step_size == NULL) return 1;
    memset(step_size, 0, (size_t)shares[0].padded * sizeof(double));
    passes(u)->step_sizes(u, step_size);
    for (int i = 0; i < count; i++) shares[i].step_size = step_size;
    run(passes(u)->apply, shares, count);
    free(step_size);
    return 0;
}

#define DIGIT 11 /* bits that are sorted by at a time */

/* Sort the numbers of rows, none of which is negative. Writes where they are in their order, those of
 * equal numbers in the order in which they are given, and each number once, with where its first one is
 * in the order, and last n. Returns how many there are, or -1 if memory could not be allocated. */
int64_t coupled_adam_sort_rows(const int64_t *rows, int64_t n, int64_t *order, int64_t *unique, int64_t *first) {
    int64_t *memory = malloc((size_t)n * sizeof(int64_t)), most = 0, count = 0;
    if (memory == NULL) return -1;
    for (int64_t i = 0; i < n; i++) {
        order[i] = i;
        if (rows[i] > most) most = rows[i];
    }
    int64_t *from = order, *to = memory;
    for (int shift = 0; most >> shift != 0; shift += DIGIT) {
        int64_t places[1 << DIGIT] = {0}, before = 0;
        for (int64_t i = 0; i < n; i++) places[rows[i] >> shift & ((1 << DIGIT) - 1)]++;
        for (int digit = 0; digit < 1 << DIGIT; digit++) {
            const int64_t here = places[digit];
            places[digit] = before;
            before += here;
        }
        for (int64_t i = 0; i < n; i++) to[places[rows[from[i]] >> shift & ((1 << DIGIT) - 1)]++] = from[i];
        int64_t *swap = from;
        from = to, to = swap;
    }
    if (from != order) memcpy(order, from, (size_t)n * sizeof(int64_t));
    free(memory);
    for (int64_t i = 0; i < n; i++) {
        const int64_t row = rows[order[i]];
        if (count > 0 && unique[count - 1] == row) continue;
        first[count] = i;
        unique[count++] = row;
    }
    first[count] = n;
    return count;
}

typedef struct {
    const Duplicates *duplicates;
    Add *add;
} Adding;

static void add_in_openmp(void *argument) {
    const Adding *adding = argument;
    const Duplicates *d = adding->duplicates;
    for (int i = openmp_thread(); i < d->threads; i += openmp_threads())
        adding->add(d, d->sums * i / d->threads, d->sums * (i + 1) / d->threads);
}

/* Add up the rows of a sparse gradient that have the same number. */
int coupled_adam_add_duplicates(Duplicates *d) {
    Adding adding = {d, PASSES[coupled_adam_instructions][d->dtype].add};
    if (d->threads > 1 && openmp_parallel != NULL) openmp_parallel(add_in_openmp, &adding, 0, 0);
    else adding.add(d, 0, d->sums);
    return 0;
}

/* Update r, the first moment and the parameter; write sums, with row_count that count as the last of
 * them; with finish also update nu and mean_update. */
int coupled_adam_lean(Update *u) {
    if (sum(passes(u)->lean, u, 2 * u->columns + 1)) return 1;
    double *count = u->sums + 2 * u->columns;
    if (u->row_count != NULL) *count = (double)(*u->row_count += (int64_t)*count);
    if (u->finish) passes(u)->finish(u);
    return 0;
}
