/* The two passes over a matrix's rows for one dtype; native.c includes this file once for each dtype.
 *
 * T is the dtype in memory, WIDE the dtype of the arithmetic, LOAD and STORE convert between them,
 * and NAME(x) is x with the dtype's suffix.
 *
 * A thread divides its rows into four long runs of adjacent rows, and works on one row from each of
 * two runs, or of all four, at a time. A core spends its time waiting for cache lines, and reading
 * several streams keeps more requests in flight than reading a single one. How many streams are
 * best, and whether prefetching helps, depends on the processor (native.c chooses). A column's sum
 * or step size is loaded once for all these rows.
 *
 * Results are bit-identical on all processors, whatever the number of streams: each pair of runs has
 * its own sums, no loop over columns is a reduction, and -ffp-contract is off.
 */

/* As torch.lerp, exact at both ends: without momentum the first moment equals the gradient. */
#define LERP(old, x) (light ? old + weight * (x - old) : x - (1 - weight) * (x - old))
#define LINE (64 / (int)sizeof(T)) /* elements of a cache line */

/* For one row of each run in `pairs` pairs of `width` runs: add the squared gradient to the pair's
 * `partial` sums, and update the first moment if `moment` is set. `row` is the row of the first run,
 * and each further run starts `run` rows after the one before. */
ALWAYS_INLINE static void NAME(measure_row)(const Update *u, int64_t row, int64_t run,
                                            const int pairs, const int width, const int moment,
                                            WIDE *restrict partial) {
    const int64_t columns = u->columns;
    const WIDE weight = (WIDE)u->weight;
    const int light = weight < (WIDE)0.5;
    const T *g[4];
    T *m[4];
    for (int r = 0; r < pairs * width; r++) {
        g[r] = (const T *)u->grad + (row + r * run) * u->grad_stride;
        m[r] = moment ? (T *)u->exp_avg + (row + r * run) * u->exp_avg_stride : NULL;
    }
    const int64_t block = pairs == 2 ? BLOCK : columns;
    for (int64_t start = 0; start < columns; start += block) {
        const int64_t stop = start + block < columns ? start + block : columns;
        if (pairs == 2) /* four streams: prefetch their cache lines */
            for (int64_t i = start; i < stop; i += LINE)
                for (int r = 0; r < pairs * width; r++) {
                    __builtin_prefetch((const char *)(g[r] + i) + AHEAD);
                    if (moment) __builtin_prefetch((const char *)(m[r] + i) + AHEAD);
                }
        NO_ALIASES
        for (int64_t i = start; i < stop; i++)
            for (int pair = 0; pair < pairs; pair++) {
                WIDE total = 0;
                for (int r = pair * width; r < (pair + 1) * width; r++) {
                    const WIDE x = LOAD(g[r][i]);
                    total += x * x;
                    if (moment) {
                        const WIDE old = LOAD(m[r][i]);
                        m[r][i] = STORE(LERP(old, x));
                    }
                }
                partial[pair * columns + i] += total;
            }
    }
}

/* Add the partial sums in WIDE to the sums in double precision, and reset them. */
static void NAME(collect)(WIDE *restrict partial, double *restrict sums, int64_t columns) {
    for (int64_t i = 0; i < columns; i++) {
        sums[i] += (double)partial[i];
        partial[i] = 0;
    }
}

/* Measure all rows of one pair of runs, or of two pairs. */
ALWAYS_INLINE static void NAME(measure_runs)(const Update *u, int64_t first, int64_t run,
                                             const int pairs, const int moment, WIDE *partial,
                                             double *const *sums) {
    for (int64_t done = 1; done <= run; done++) {
        NAME(measure_row)(u, first + done - 1, run, pairs, 2, moment, partial);
        if (done % (SUM_ROWS / 2) == 0 || done == run)
            for (int pair = 0; pair < pairs; pair++)
                NAME(collect)(partial + pair * u->columns, sums[pair], u->columns);
    }
}

ALWAYS_INLINE static void NAME(measure_share)(Share *share, const int moment, WIDE *partial,
                                              double *const *sums) {
    const Update *u = share->update;
    const int64_t first = share->first, run = (share->last - first) / 4;
    if (coupled_adam_streams == 4) {
        NAME(measure_runs)(u, first, run, 2, moment, partial, sums);
    } else {
        NAME(measure_runs)(u, first, run, 1, moment, partial, sums);
        NAME(measure_runs)(u, first + 2 * run, run, 1, moment, partial, sums + 1);
    }
    for (int64_t row = first + 4 * run; row < share->last; row++)
        NAME(measure_row)(u, row, 0, 1, 1, moment, partial);
    NAME(collect)(partial, sums[0], u->columns);
}

FOR_EACH_CPU static void NAME(measure)(Share *share) {
    const Update *u = share->update;
    const size_t columns = (size_t)u->columns;
    WIDE *partial = calloc(2 * columns + 1, sizeof(WIDE));
    double *second = calloc(columns + 1, sizeof(double));
    if (partial == NULL || second == NULL) {
        share->failed = 1;
    } else {
        double *const sums[2] = {share->sums, second};
        memset(share->sums, 0, columns * sizeof(double));
        if (u->update_moment)
            NAME(measure_share)(share, 1, partial, sums);
        else
            NAME(measure_share)(share, 0, partial, sums);
        for (size_t i = 0; i < columns; i++) share->sums[i] += second[i];
    }
    free(partial);
    free(second);
}

/* For one row of each of `runs` runs: update the first moment if `moment` is set, then the
 * parameter. */
ALWAYS_INLINE static void NAME(apply_row)(const Update *u, int64_t row, int64_t run, const int runs,
                                          const int moment, const int stochastic,
                                          const WIDE *restrict step_size) {
    const int64_t columns = u->columns;
    const WIDE weight = (WIDE)u->weight, factor = (WIDE)u->factor, decay = (WIDE)u->decay;
    const int light = weight < (WIDE)0.5;
    const T *g[4];
    T *m[4], *p[4];
    uint32_t key[4];
    for (int r = 0; r < runs; r++) {
        const int64_t at = row + r * run;
        g[r] = moment ? (const T *)u->grad + at * u->grad_stride : NULL;
        m[r] = (T *)u->exp_avg + at * u->exp_avg_stride;
        p[r] = (T *)u->param + at * u->param_stride;
        key[r] = stochastic ? mix(mix(u->noise_row + (uint32_t)at) ^ u->noise_key) : 0;
    }
    const int64_t block = runs == 4 ? BLOCK : columns;
    for (int64_t start = 0; start < columns; start += block) {
        const int64_t stop = start + block < columns ? start + block : columns;
        if (runs == 4)
            for (int64_t i = start; i < stop; i += LINE)
                for (int r = 0; r < runs; r++) {
                    if (moment) __builtin_prefetch((const char *)(g[r] + i) + AHEAD);
                    __builtin_prefetch((const char *)(m[r] + i) + AHEAD);
                    __builtin_prefetch((const char *)(p[r] + i) + AHEAD);
                }
        NO_ALIASES
        for (int64_t i = start; i < stop; i++)
            for (int r = 0; r < runs; r++) {
                if (moment) {
                    const WIDE x = factor * LOAD(g[r][i]), old = LOAD(m[r][i]);
                    m[r][i] = STORE(LERP(old, x));
                }
                const WIDE value = decay * LOAD(p[r][i]) - step_size[i] * LOAD(m[r][i]);
                p[r][i] = stochastic ? STORE_STOCHASTICALLY(
                                           value, mix(key[r] ^ (u->noise_column + (uint32_t)i)))
                                     : STORE(value);
            }
    }
    (void)key;
}

ALWAYS_INLINE static void NAME(apply_runs)(Share *share, const int runs, const int moment,
                                           const int stochastic) {
    const Update *u = share->update;
    const int64_t run = (share->last - share->first) / runs;
    for (int64_t row = share->first; row < share->first + run; row++)
        NAME(apply_row)(u, row, run, runs, moment, stochastic, share->step_size);
    for (int64_t row = share->first + runs * run; row < share->last; row++)
        NAME(apply_row)(u, row, 0, 1, moment, stochastic, share->step_size);
}

ALWAYS_INLINE static void NAME(apply_share)(Share *share, const int moment, const int stochastic) {
    if (coupled_adam_streams == 4)
        NAME(apply_runs)(share, 4, moment, stochastic);
    else
        NAME(apply_runs)(share, 2, moment, stochastic);
}

FOR_EACH_CPU static void NAME(apply)(Share *share) {
    const Update *u = share->update;
    if (HAS_STOCHASTIC && u->stochastic) {
        if (u->update_moment) /* measure has already updated the first moment */
            NAME(apply_share)(share, 0, HAS_STOCHASTIC);
        else
            NAME(apply_share)(share, 1, HAS_STOCHASTIC);
    } else if (u->update_moment) {
        NAME(apply_share)(share, 0, 0);
    } else {
        NAME(apply_share)(share, 1, 0);
    }
}

/* Update nu and its maximum, and compute the step size of each column. */
static void NAME(step_sizes)(const Update *u, void *step_sizes) {
    WIDE *step_size = step_sizes, *nu = u->exp_avg_sq, *maximum = u->max_exp_avg_sq;
    for (int64_t i = 0; i < u->columns; i++) {
        /* A gradient clipped to zero contributes zero, even where its sum has overflowed to inf. */
        const double share = u->share == 0 ? 0 : u->share * u->sums[i];
        nu[i] = (WIDE)(u->beta2 * nu[i] + share);
        WIDE highest = nu[i];
        if (maximum != NULL) { /* as torch.maximum, which propagates NaN */
            if (maximum[i] > highest || maximum[i] != maximum[i]) highest = maximum[i];
            maximum[i] = highest;
        }
        step_size[i] = (WIDE)(u->lr / (sqrt(highest * u->scale) + u->eps));
    }
}

#undef LERP
#undef LINE
#undef T
#undef WIDE
#undef LOAD
#undef STORE
#undef STORE_STOCHASTICALLY
#undef HAS_STOCHASTIC
#undef NAME
