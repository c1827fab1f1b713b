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
#define LANES 8                    /* sums of a row's squares that are computed at a time */

/* What measure does besides summing the squared gradient, as constants: whether it updates the first
 * moment, sums each row's squares, and sums the first moment, with the rows' weights if they are
 * known from the rows' squares. */
typedef struct {
    int moment, rows, center;
} NAME(Work);

/* The sums of one or two pairs of runs: of the squared gradient and of the weighted first moment; in
 * WIDE for some rows, and in double precision for all. A row's weight is known after its last column:
 * `m` and `weight` are those of the rows before, which are still in the cache; they are added while
 * the next rows are on their way from memory. Before the first rows there are `zeros`. */
typedef struct {
    WIDE *partial, *partial_moment;
    double *sums[2], *moment_sums[2];
    const T *m[4], *zeros;
    WIDE weight[4];
} NAME(Sums);

/* r^-exponent, and 0 for a row that never had a gradient. */
ALWAYS_INLINE static WIDE NAME(weight)(WIDE r, double exponent) {
    if (r == 0) return 0;
    if (exponent == 0.25) return 1 / SQRT(SQRT(r));
    if (exponent == 0.5) return 1 / SQRT(r);
    return (WIDE)pow(r, -exponent); /* slow, and its last bit may depend on the C library */
}

/* Given the sums of a row's squares in lanes, store their sum, update r and return the weight. */
ALWAYS_INLINE static WIDE NAME(weigh_row)(const Update *u, int64_t row, WIDE *restrict lanes) {
    for (int half = LANES / 2; half > 0; half /= 2) /* always in the same order */
        for (int k = 0; k < half; k++) lanes[k] += lanes[k + half];
    ((WIDE *)u->row_sums)[row] = lanes[0];
    if (u->exp_avg_sq_row == NULL) return 1;
    WIDE *r = (WIDE *)u->exp_avg_sq_row + row;
    *r = (WIDE)(u->beta2 * *r + u->row_share * lanes[0]);
    return ((WIDE *)u->weights)[row] = NAME(weight)(*r, u->exponent);
}

/* The pointers of measure_columns, to one row of each run. */
typedef struct {
    const T *g[4];
    T *m[4];
    WIDE lanes[4][LANES];
} NAME(Rows);

/* Measure `count` columns, starting with `first`, of one row of each run. */
ALWAYS_INLINE static void NAME(measure_columns)(const Update *u, int64_t first, const int64_t count,
                                                const int pairs, const int width,
                                                const NAME(Work) work,
                                                NAME(Rows) *restrict rows,
                                                NAME(Sums) *restrict s) {
    const WIDE weight = (WIDE)u->weight;
    const int light = weight < (WIDE)0.5;
    NO_ALIASES
    for (int64_t k = 0; k < count; k++)
        for (int pair = 0; pair < pairs; pair++) {
            const int64_t i = first + k, at = pair * u->columns + i;
            WIDE total = 0, moments = 0;
            for (int r = pair * width; r < (pair + 1) * width; r++) {
                const WIDE x = LOAD(rows->g[r][i]);
                total += x * x;
                if (work.rows) rows->lanes[r][k] += x * x;
                if (work.moment) {
                    const WIDE old = LOAD(rows->m[r][i]);
                    rows->m[r][i] = STORE(LERP(old, x));
                }
                if (work.center)
                    moments += work.rows ? s->weight[r] * LOAD(s->m[r][i]) : LOAD(rows->m[r][i]);
            }
            s->partial[at] += total;
            if (work.center) s->partial_moment[at] += moments;
        }
}

/* The last columns, fewer than LANES. Its options are no constants, as that would be compiled often. */
__attribute__((noinline)) static void NAME(measure_last)(const Update *u, int64_t first, int pairs,
                                                         int width, NAME(Work) work,
                                                         NAME(Rows) *rows, NAME(Sums) *s) {
    NAME(measure_columns)(u, first, u->columns - first, pairs, width, work, rows, s);
}

/* For one row of each run in `pairs` pairs of `width` runs: add the squared gradient to the pair's
 * partial sums, and do the other work. `row` is the row of the first run, and each further run starts
 * `run` rows after the one before. */
ALWAYS_INLINE static void NAME(measure_row)(const Update *u, int64_t row, int64_t run,
                                            const int pairs, const int width,
                                            const NAME(Work) work, NAME(Sums) *s) {
    const int64_t columns = u->columns;
    const int runs = pairs * width;
    NAME(Rows) rows;
    for (int r = 0; r < runs; r++) {
        rows.g[r] = (const T *)u->grad + (row + r * run) * u->grad_stride;
        rows.m[r] = work.moment ? (T *)u->exp_avg + (row + r * run) * u->exp_avg_stride : NULL;
        for (int k = 0; work.rows && k < LANES; k++) rows.lanes[r][k] = 0;
    }
    const int64_t block = pairs == 2 ? BLOCK : columns;
    for (int64_t start = 0; start < columns; start += block) {
        const int64_t stop = start + block < columns ? start + block : columns;
        if (pairs == 2) /* four streams: prefetch their cache lines */
            for (int64_t i = start; i < stop; i += LINE)
                for (int r = 0; r < runs; r++) {
                    __builtin_prefetch((const char *)(rows.g[r] + i) + AHEAD);
                    if (work.moment) __builtin_prefetch((const char *)(rows.m[r] + i) + AHEAD);
                }
        int64_t i = start;
        for (; i + LANES <= stop; i += LANES)
            NAME(measure_columns)(u, i, LANES, pairs, width, work, &rows, s);
        if (i < stop) NAME(measure_last)(u, i, pairs, width, work, &rows, s);
    }
    for (int r = 0; work.rows && r < runs; r++) {
        s->weight[r] = NAME(weigh_row)(u, row + r * run, rows.lanes[r]);
        s->m[r] = rows.m[r];
    }
}

/* Add the first moments of the last rows of `pairs` pairs of `width` runs, with their weights. */
ALWAYS_INLINE static void NAME(add_last)(const Update *u, const int pairs, const int width,
                                         const NAME(Work) work, NAME(Sums) *s) {
    if (!work.rows || !work.center) return;
    for (int r = 0; r < pairs * width; r++) {
        WIDE *restrict partial = s->partial_moment + r / width * u->columns;
        NO_ALIASES
        for (int64_t i = 0; i < u->columns; i++) partial[i] += s->weight[r] * LOAD(s->m[r][i]);
        s->m[r] = s->zeros;
    }
}

/* For one row of each of two runs that are `run` rows apart: update the first moment, unless measure
 * has, and add it to `partial` with the rows' weights. */
ALWAYS_INLINE static void NAME(center_row)(const Update *u, int64_t row, int64_t run, const int runs,
                                           WIDE *restrict partial) {
    const WIDE weight = (WIDE)u->weight, factor = (WIDE)u->factor;
    const int light = weight < (WIDE)0.5, moment = !u->update_moment;
    const T *g[2];
    T *m[2];
    WIDE row_weight[2];
    for (int r = 0; r < runs; r++) {
        const int64_t at = row + r * run;
        g[r] = (const T *)u->grad + at * u->grad_stride;
        m[r] = (T *)u->exp_avg + at * u->exp_avg_stride;
        row_weight[r] = u->weights != NULL ? ((const WIDE *)u->weights)[at] : 1;
    }
    if (moment) {
        NO_ALIASES
        for (int64_t i = 0; i < u->columns; i++)
            for (int r = 0; r < runs; r++) {
                const WIDE x = factor * LOAD(g[r][i]), old = LOAD(m[r][i]);
                m[r][i] = STORE(LERP(old, x));
                partial[i] += row_weight[r] * LOAD(m[r][i]);
            }
    } else {
        NO_ALIASES
        for (int64_t i = 0; i < u->columns; i++)
            for (int r = 0; r < runs; r++) partial[i] += row_weight[r] * LOAD(m[r][i]);
    }
}

/* Add the partial sums in WIDE to the sums in double precision, and reset them. */
static void NAME(collect)(WIDE *restrict partial, double *restrict sums, int64_t columns) {
    for (int64_t i = 0; i < columns; i++) {
        sums[i] += (double)partial[i];
        partial[i] = 0;
    }
}

ALWAYS_INLINE static void NAME(collect_all)(NAME(Sums) *s, int pair, int from, int64_t columns) {
    NAME(collect)(s->partial + from * columns, s->sums[pair], columns);
    if (s->partial_moment != NULL)
        NAME(collect)(s->partial_moment + from * columns, s->moment_sums[pair], columns);
}

/* Measure all rows of the `pair`-th pair of runs, or of both pairs. */
ALWAYS_INLINE static void NAME(measure_runs)(const Update *u, int64_t first, int64_t run,
                                             const int pairs, int pair, const NAME(Work) work,
                                             NAME(Sums) *s) {
    for (int64_t done = 1; done <= run; done++) {
        NAME(measure_row)(u, first + done - 1, run, pairs, 2, work, s);
        if (done == run) NAME(add_last)(u, pairs, 2, work, s);
        if (done % (SUM_ROWS / 2) == 0 || done == run)
            for (int k = 0; k < pairs; k++) NAME(collect_all)(s, pair + k, k, u->columns);
    }
}

ALWAYS_INLINE static void NAME(measure_share)(Share *share, const NAME(Work) work, NAME(Sums) *s) {
    const Update *u = share->update;
    const int64_t first = share->first, run = (share->last - first) / 4;
    if (coupled_adam_streams == 4) {
        NAME(measure_runs)(u, first, run, 2, 0, work, s);
    } else {
        for (int pair = 0; pair < 2; pair++)
            NAME(measure_runs)(u, first + 2 * pair * run, run, 1, pair, work, s);
    }
    for (int64_t row = first + 4 * run; row < share->last; row++) {
        NAME(measure_row)(u, row, 0, 1, 1, work, s);
        NAME(add_last)(u, 1, 1, work, s);
    }
    NAME(collect_all)(s, 0, 0, u->columns);
}

/* As constants, the options cost nothing where they are not used. */
ALWAYS_INLINE static void NAME(measure_with)(Share *share, const int moment, NAME(Sums) *s) {
    const int rows = share->update->row_sums != NULL, center = share->moment_sums != NULL;
    if (center)
        rows ? NAME(measure_share)(share, (NAME(Work)){moment, 1, 1}, s)
             : NAME(measure_share)(share, (NAME(Work)){moment, 0, 1}, s);
    else
        rows ? NAME(measure_share)(share, (NAME(Work)){moment, 1, 0}, s)
             : NAME(measure_share)(share, (NAME(Work)){moment, 0, 0}, s);
}

FOR_EACH_CPU static void NAME(center)(Share *share) {
    const Update *u = share->update;
    const int64_t run = (share->last - share->first) / 2;
    WIDE *partial = calloc((size_t)u->columns + 1, sizeof(WIDE));
    if (partial == NULL) {
        share->failed = 1;
        return;
    }
    memset(share->moment_sums, 0, (size_t)u->columns * sizeof(double));
    for (int64_t done = 1; done <= run; done++) {
        NAME(center_row)(u, share->first + done - 1, run, 2, partial);
        if (done % (SUM_ROWS / 2) == 0) NAME(collect)(partial, share->moment_sums, u->columns);
    }
    for (int64_t row = share->first + 2 * run; row < share->last; row++)
        NAME(center_row)(u, row, 0, 1, partial);
    NAME(collect)(partial, share->moment_sums, u->columns);
    free(partial);
}

FOR_EACH_CPU static void NAME(measure)(Share *share) {
    const Update *u = share->update;
    const size_t columns = (size_t)u->columns;
    WIDE *partial = calloc(4 * columns + 1, sizeof(WIDE));
    double *second = calloc(2 * columns + 1, sizeof(double));
    T *zeros = calloc(columns + 1, sizeof(T));
    if (partial == NULL || second == NULL || zeros == NULL) {
        share->failed = 1;
    } else {
        NAME(Sums) s = {.partial = partial, .sums = {share->sums, second}, .zeros = zeros};
        for (int r = 0; r < 4; r++) s.m[r] = zeros, s.weight[r] = 0;
        memset(share->sums, 0, columns * sizeof(double));
        if (u->moment_sums != NULL) {
            s.partial_moment = partial + 2 * columns;
            s.moment_sums[0] = share->moment_sums;
            s.moment_sums[1] = second + columns;
            memset(share->moment_sums, 0, columns * sizeof(double));
        }
        if (u->update_moment) /* without it, there is nothing to center yet */
            NAME(measure_with)(share, 1, &s);
        else if (u->row_sums != NULL)
            NAME(measure_share)(share, (NAME(Work)){0, 1, 0}, &s);
        else
            NAME(measure_share)(share, (NAME(Work)){0, 0, 0}, &s);
        for (size_t i = 0; i < columns; i++) share->sums[i] += second[i];
        for (size_t i = 0; u->moment_sums != NULL && i < columns; i++)
            share->moment_sums[i] += second[columns + i];
    }
    free(partial);
    free(second);
    free(zeros);
}

/* For one row of each of `runs` runs: update the first moment if `moment` is set, then the
 * parameter. */
ALWAYS_INLINE static void NAME(apply_row)(const Update *u, int64_t row, int64_t run, const int runs,
                                          const int moment, const int stochastic,
                                          const int weigh, const WIDE *restrict step_size,
                                          const WIDE *restrict mean) {
    const int64_t columns = u->columns;
    const WIDE weight = (WIDE)u->weight, factor = (WIDE)u->factor, decay = (WIDE)u->decay;
    const int light = weight < (WIDE)0.5;
    const T *g[4];
    T *m[4], *p[4];
    uint32_t key[4];
    WIDE row_weight[4];
    for (int r = 0; r < runs; r++) {
        const int64_t at = row + r * run;
        g[r] = moment ? (const T *)u->grad + at * u->grad_stride : NULL;
        m[r] = (T *)u->exp_avg + at * u->exp_avg_stride;
        p[r] = (T *)u->param + at * u->param_stride;
        row_weight[r] = weigh && u->weights != NULL ? ((const WIDE *)u->weights)[at] : 1;
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
                WIDE step = LOAD(m[r][i]);
                if (weigh) step = row_weight[r] * step - mean[i];
                const WIDE value = decay * LOAD(p[r][i]) - step_size[i] * step;
                p[r][i] = stochastic ? STORE_STOCHASTICALLY(
                                           value, mix(key[r] ^ (u->noise_column + (uint32_t)i)))
                                     : STORE(value);
            }
    }
    (void)key;
    (void)row_weight;
}

ALWAYS_INLINE static void NAME(apply_runs)(Share *share, const int runs, const int moment,
                                           const int stochastic, const int weigh) {
    const Update *u = share->update;
    const WIDE *step_size = share->step_size, *mean = share->mean;
    const int64_t run = (share->last - share->first) / runs;
    for (int64_t row = share->first; row < share->first + run; row++)
        NAME(apply_row)(u, row, run, runs, moment, stochastic, weigh, step_size, mean);
    for (int64_t row = share->first + runs * run; row < share->last; row++)
        NAME(apply_row)(u, row, 0, 1, moment, stochastic, weigh, step_size, mean);
}

ALWAYS_INLINE static void NAME(apply_share)(Share *share, const int moment, const int stochastic,
                                            const int weigh) {
    if (coupled_adam_streams == 4)
        NAME(apply_runs)(share, 4, moment, stochastic, weigh);
    else
        NAME(apply_runs)(share, 2, moment, stochastic, weigh);
}

/* As constants, the options cost nothing where they are not used. */
ALWAYS_INLINE static void NAME(apply_with)(Share *share, const int stochastic, const int weigh) {
    if (share->update->update_moment) /* measure has already updated the first moment */
        NAME(apply_share)(share, 0, stochastic, weigh);
    else
        NAME(apply_share)(share, 1, stochastic, weigh);
}

FOR_EACH_CPU static void NAME(apply)(Share *share) {
    const Update *u = share->update;
    const int weigh = u->weights != NULL || u->moment_sums != NULL;
    if (HAS_STOCHASTIC && u->stochastic)
        weigh ? NAME(apply_with)(share, HAS_STOCHASTIC, 1)
              : NAME(apply_with)(share, HAS_STOCHASTIC, 0);
    else
        weigh ? NAME(apply_with)(share, 0, 1) : NAME(apply_with)(share, 0, 0);
}

/* Update nu and its maximum, and compute each column's step size, and the mean of the rows' weighted
 * first moments, which is 0 without zero_sum. */
static void NAME(step_sizes)(const Update *u, void *step_sizes, void *means) {
    WIDE *step_size = step_sizes, *mean = means, *nu = u->exp_avg_sq, *maximum = u->max_exp_avg_sq;
    double total = 0;
    for (int64_t i = 0; i < u->columns; i++) {
        /* A gradient clipped to zero contributes zero, even where its sum has overflowed to inf. */
        const double share = u->share == 0 ? 0 : u->share * u->sums[i];
        nu[i] = (WIDE)(u->beta2 * nu[i] + share);
        WIDE highest = nu[i];
        if (maximum != NULL) { /* as torch.maximum, which propagates NaN */
            if (maximum[i] > highest || maximum[i] != maximum[i]) highest = maximum[i];
            maximum[i] = highest;
        }
        total += nu[i];
        step_size[i] = (WIDE)(u->lr / (sqrt(highest * u->scale) + u->eps));
        mean[i] = u->moment_sums == NULL ? 0 : (WIDE)(u->moment_sums[i] / u->vocab_size);
    }
    if (u->exponent != 0) {
        const double scale = pow(total / (double)u->columns, u->exponent);
        for (int64_t i = 0; i < u->columns; i++) step_size[i] = (WIDE)(step_size[i] * scale);
    }
}

#undef LERP
#undef LINE
#undef SQRT
#undef LANES
#undef T
#undef WIDE
#undef LOAD
#undef STORE
#undef STORE_STOCHASTICALLY
#undef HAS_STOCHASTIC
#undef NAME
