/* The passes over a matrix's rows, for one dtype and one instruction set (see native_dtypes.h).
 *
 * Two things make them fast. A core spends its time waiting for cache lines; so a thread divides its
 * rows into runs of adjacent rows that are far apart, works on a row of each run at a time, and
 * prefetches them, which keeps more requests in flight than one stream of rows. And the loops over
 * columns, the functions whose names end in _columns, work on a cache line at a time, with vectors of
 * its size, which the compiler splits into those of the processor. They take a pair of rows at a time,
 * so that a column's sum or step size is loaded once for both.
 *
 * Results are bit-identical for all instruction sets: the order of every sum is written here, and
 * -ffp-contract is off. They depend on the number of threads.
 */

#define LINE (64 / (int)sizeof(T))     /* elements of a cache line */
#define LANES (64 / (int)sizeof(WIDE)) /* elements of a vector */
#define PARTS (LINE / LANES)           /* vectors of a cache line: 2 for bfloat16, otherwise 1 */

typedef WIDE NAME(Vector) __attribute__((vector_size(64)));
#define VECTOR NAME(Vector)

/* A cache line of bfloat16 is read as 16 numbers of 32 bits. Their lower halves make the first vector,
 * their upper halves the second: that takes one operation each on every processor, but each vector
 * then holds every other column. All vectors over the columns (sums, step sizes) have this order, in
 * which a column is at this place. */
static int64_t NAME(place)(int64_t column) {
    return column / LINE * LINE + column % PARTS * LANES + column % LINE / PARTS;
}

ALWAYS_INLINE static VECTOR NAME(load)(const T *line, const int part) {
#if IS_BFLOAT16
    Bits bits;
    memcpy(&bits, line, sizeof bits);
    bits = part ? bits & 0xffff0000 : bits << 16;
    return (VECTOR)bits;
#else
    (void)part;
    VECTOR values;
    memcpy(&values, line, sizeof values);
    return values;
#endif
}

/* Round to nearest, ties to even; or, with `noise`, stochastically. */
ALWAYS_INLINE static void NAME(store)(T *line, const VECTOR *values, const Bits *noise) {
#if IS_BFLOAT16
    Bits rounded[2];
    for (int part = 0; part < 2; part++) {
        const Bits bits = (Bits)values[part];
        const Bits added = noise ? noise[part] >> 16 : 0x7fff + ((bits >> 16) & 1);
        /* All ones for NaN, which a carry could turn into another number. (The compiler would compare
         * vectors one number at a time.) */
        const Bits nan = (Bits)((SignedBits)(0x7f800000 - (bits & 0x7fffffff)) >> 31);
        rounded[part] = ((bits + added) & ~nan) | (0x7fc00000 & nan);
    }
    const Bits both = (rounded[0] >> 16) | (rounded[1] & 0xffff0000);
    memcpy(line, &both, sizeof both);
#else
    (void)noise;
    memcpy(line, values, sizeof *values);
#endif
}

/* All that the loops over columns need to know of a pair of rows. A row without a partner is paired
 * with a row of zeros. */
typedef struct {
    const Update *update;
    /* A row of the gradient, of the first moment and of the parameter, from column `origin` on; and a
     * row of the updates, which are the first moment or, where there is none, the gradient, but for the
     * factor `weight`. */
    T *rows[4][2];
    int64_t origin;
    WIDE weight[2];
    VECTOR squares[2];         /* the sums of each row's squares, in lanes */
    WIDE *sums, *update_sums;  /* the columns' sums of squares and of updates, over some rows */
    const WIDE *step_size;
    const WIDE *mean[2];       /* the mean update; zeros for a row that must not move */
    uint32_t key[2];           /* of the random numbers */
    int64_t row[2];            /* negative for a row of zeros */
} NAME(Pair);
#define PAIR NAME(Pair)
#define ROW(kind, r) (pair->rows[kind][r] + start - pair->origin)
#define PREFETCH(line) __builtin_prefetch((const char *)(line) + AHEAD)

/* Update a cache line of the first moment as torch.lerp does, exact at both ends. */
ALWAYS_INLINE static void NAME(lerp)(T *moment, const T *grad, WIDE factor, WIDE weight) {
    VECTOR values[PARTS];
    for (int part = 0; part < PARTS; part++) {
        const VECTOR old = NAME(load)(moment, part), x = factor * NAME(load)(grad, part);
        const VECTOR change = x - old;
        values[part] = weight < (WIDE)0.5 ? old + weight * change : x - (1 - weight) * change;
    }
    NAME(store)(moment, values, NULL);
}

/* Sum the squared gradient over the rows. With `by_row` also sum it over the columns; with `moment`
 * also update the first moment. */
ALWAYS_INLINE static void NAME(square)(PAIR *pair, int64_t start, int64_t count, const int by_row,
                                       const int moment) {
    const T *g0 = ROW(GRAD, 0), *g1 = ROW(GRAD, 1);
    T *m0 = ROW(MOMENT, 0), *m1 = ROW(MOMENT, 1);
    WIDE *sums = pair->sums + start;
    const WIDE weight = (WIDE)pair->update->weight;
    VECTOR squares0 = pair->squares[0], squares1 = pair->squares[1];
    for (int64_t i = 0; i < count; i += LINE) {
        PREFETCH(g0 + i);
        PREFETCH(g1 + i);
        for (int part = 0; part < PARTS; part++) {
            const VECTOR x0 = NAME(load)(g0 + i, part), x1 = NAME(load)(g1 + i, part);
            VECTOR *sum = (VECTOR *)(sums + i) + part;
            *sum += x0 * x0 + x1 * x1;
            if (by_row) squares0 += x0 * x0, squares1 += x1 * x1;
        }
        if (moment) {
            PREFETCH(m0 + i);
            PREFETCH(m1 + i);
            NAME(lerp)(m0 + i, g0 + i, 1, weight);
            NAME(lerp)(m1 + i, g1 + i, 1, weight);
        }
    }
    pair->squares[0] = squares0;
    pair->squares[1] = squares1;
}

/* As constants, the options cost nothing where they are not used. */
typedef void NAME(Columns)(PAIR *pair, int64_t start, int64_t count);
#define COLUMNS __attribute__((noinline)) static void
COLUMNS NAME(square_columns)(PAIR *pair, int64_t start, int64_t count) {
    NAME(square)(pair, start, count, 0, 0);
}
COLUMNS NAME(square_rows_columns)(PAIR *pair, int64_t start, int64_t count) {
    NAME(square)(pair, start, count, 1, 0);
}
COLUMNS NAME(square_moment_columns)(PAIR *pair, int64_t start, int64_t count) {
    NAME(square)(pair, start, count, 0, 1);
}
COLUMNS NAME(square_rows_moment_columns)(PAIR *pair, int64_t start, int64_t count) {
    NAME(square)(pair, start, count, 1, 1);
}

/* Update the first moment. */
COLUMNS NAME(moment_columns)(PAIR *pair, int64_t start, int64_t count) {
    const T *g0 = ROW(GRAD, 0), *g1 = ROW(GRAD, 1);
    T *m0 = ROW(MOMENT, 0), *m1 = ROW(MOMENT, 1);
    const WIDE factor = (WIDE)pair->update->factor, weight = (WIDE)pair->update->weight;
    for (int64_t i = 0; i < count; i += LINE) {
        PREFETCH(g0 + i);
        PREFETCH(g1 + i);
        PREFETCH(m0 + i);
        PREFETCH(m1 + i);
        NAME(lerp)(m0 + i, g0 + i, factor, weight);
        NAME(lerp)(m1 + i, g1 + i, factor, weight);
    }
}

/* Sum the updates over the rows. */
COLUMNS NAME(sum_columns)(PAIR *pair, int64_t start, int64_t count) {
    const T *u0 = ROW(UPDATE, 0), *u1 = ROW(UPDATE, 1);
    WIDE *sums = pair->update_sums + start;
    const WIDE weight0 = pair->weight[0], weight1 = pair->weight[1];
    for (int64_t i = 0; i < count; i += LINE) {
        for (int part = 0; part < PARTS; part++) {
            VECTOR *sum = (VECTOR *)(sums + i) + part;
            *sum += weight0 * NAME(load)(u0 + i, part) + weight1 * NAME(load)(u1 + i, part);
        }
    }
}

/* Update the parameter. */
ALWAYS_INLINE static void NAME(update)(PAIR *pair, int64_t start, int64_t count,
                                       const int stochastic) {
    const WIDE decay = (WIDE)pair->update->decay, weight[2] = {pair->weight[0], pair->weight[1]};
    const WIDE *step_sizes = pair->step_size + start;
    const WIDE *means[2] = {pair->mean[0] + start, pair->mean[1] + start};
    const T *u[2] = {ROW(UPDATE, 0), ROW(UPDATE, 1)};
    T *p[2] = {ROW(PARAM, 0), ROW(PARAM, 1)};
    for (int64_t i = 0; i < count; i += LINE) {
        for (int r = 0; r < 2; r++) {
            PREFETCH(u[r] + i);
            PREFETCH(p[r] + i);
            VECTOR values[PARTS];
            for (int part = 0; part < PARTS; part++) {
                const VECTOR *step_size = (const VECTOR *)(step_sizes + i) + part;
                const VECTOR *mean = (const VECTOR *)(means[r] + i) + part;
                const VECTOR step = weight[r] * NAME(load)(u[r] + i, part) - *mean;
                values[part] = decay * NAME(load)(p[r] + i, part) - *step_size * step;
            }
#if IS_BFLOAT16
            if (stochastic) {
                const uint32_t column = pair->update->noise_column + (uint32_t)(start + i);
                Bits noise[2];
                for (int part = 0; part < 2; part++) {
                    Bits x = (EVEN_COLUMNS + (column + (uint32_t)part)) ^ pair->key[r];
                    x = (x ^ (x >> 16)) * 0x85ebca6b; /* mix */
                    x = (x ^ (x >> 13)) * 0xc2b2ae35;
                    noise[part] = x ^ (x >> 16);
                }
                NAME(store)(p[r] + i, values, noise);
                continue;
            }
#endif
            NAME(store)(p[r] + i, values, NULL);
        }
    }
}

COLUMNS NAME(update_columns)(PAIR *pair, int64_t start, int64_t count) {
    NAME(update)(pair, start, count, 0);
}
#if IS_BFLOAT16
COLUMNS NAME(update_stochastically_columns)(PAIR *pair, int64_t start, int64_t count) {
    NAME(update)(pair, start, count, 1);
}
#endif

/* Run a loop over some columns, and over the last ones, fewer than a cache line, in a copy. */
static void NAME(over)(NAME(Columns) *columns, PAIR *pair, int64_t start, int64_t stop) {
    const int64_t whole = (stop - start) / LINE * LINE, rest = stop - start - whole;
    columns(pair, start, whole);
    if (rest == 0) return;
    start += whole;
    T lines[4][2][LINE] = {0};
    PAIR copy = *pair;
    copy.origin = start;
    for (int kind = 0; kind < 4; kind++)
        for (int r = 0; r < 2; r++) {
            copy.rows[kind][r] = lines[kind][r];
            if (pair->rows[kind][r] != NULL)
                memcpy(lines[kind][r], ROW(kind, r), (size_t)rest * sizeof(T));
        }
    columns(&copy, start, LINE);
    for (int r = 0; r < 2; r++) {
        pair->squares[r] = copy.squares[r];
        if (pair->rows[MOMENT][r] != NULL)
            memcpy(ROW(MOMENT, r), lines[MOMENT][r], (size_t)rest * sizeof(T));
        if (pair->rows[PARAM][r] != NULL)
            memcpy(ROW(PARAM, r), lines[PARAM][r], (size_t)rest * sizeof(T));
    }
}

/* r^-exponent, and 0 for a row that never had a gradient. Square roots are the same everywhere, unlike
 * pow, and faster: r^-3/8 is 1 / (r^1/4 r^1/8). */
static WIDE NAME(weight)(WIDE r, double exponent) {
    if (r == 0) return 0;
    if (exponent * 8 != (int)(exponent * 8) || exponent < 0 || exponent >= 1)
        return (WIDE)pow(r, -exponent);
    WIDE root = r, product = 1;
    for (int rest = (int)(exponent * 8), bit = 4; rest != 0; rest &= ~bit, bit /= 2) {
        root = SQRT(root);
        if (rest & bit) product *= root;
    }
    return 1 / product;
}

/* Write the sum of a row's squares and the row's weight; return the weight. */
static WIDE NAME(weigh)(Share *share, int64_t row, const VECTOR *squares) {
    const Update *u = share->update;
    WIDE lanes[LANES];
    memcpy(lanes, squares, sizeof lanes);
    for (int half = LANES / 2; half > 0; half /= 2) /* always in the same order */
        for (int k = 0; k < half; k++) lanes[k] += lanes[k + half];
    ((WIDE *)u->row_sums)[row] = lanes[0];
    if (u->exp_avg_sq_row == NULL) return 1;
    const WIDE r = (WIDE)(u->beta2 * ((const WIDE *)u->exp_avg_sq_row)[row] + u->row_share * lanes[0]);
    const WIDE weight = NAME(weight)(r, u->exponent);
    share->active += weight != 0;
    return ((WIDE *)u->weights)[row] = weight;
}

/* A thread's work in a pass: two loops over columns for each pair of rows. */
typedef struct {
    Share *share;
    NAME(Columns) *loops[2]; /* NULL if there is nothing to do */
    int measures, moment;    /* whether this is the pass that measures; whether it updates the moment */
    PAIR pairs[2];
    int64_t padded;          /* columns, rounded up to whole cache lines */
    WIDE *partial;           /* the pairs' sums over some rows */
    double *total;           /* the sums over all rows */
    WIDE *no_mean;           /* zeros, the mean for a row that must not move */
    T *no_row;               /* zeros, the partner of a row without one */
} NAME(Work);

/* Make a pair point at two rows. A negative second row is one of zeros. */
static void NAME(go_to)(NAME(Work) *work, PAIR *pair, int64_t first, int64_t second) {
    const Share *share = work->share;
    const Update *u = share->update;
    const int64_t rows[2] = {first, second};
    for (int r = 0; r < 2; r++) {
        const int64_t row = pair->row[r] = rows[r];
        const int none = row < 0;
        T *g = none ? work->no_row : (T *)u->grad + row * u->grad_stride;
        T *m = none || u->exp_avg == NULL ? work->no_row : (T *)u->exp_avg + row * u->exp_avg_stride;
        pair->rows[GRAD][r] = g;
        if (work->moment) pair->rows[MOMENT][r] = m;
        if (work->measures) continue;
        pair->rows[UPDATE][r] = u->exp_avg == NULL ? g : m;
        pair->weight[r] = none ? 0 : u->weights == NULL ? 1 : ((const WIDE *)u->weights)[row];
        pair->mean[r] = pair->weight[r] == 0 ? work->no_mean : share->mean;
        if (u->exp_avg == NULL) pair->weight[r] *= (WIDE)u->factor;
        if (share->step_size == NULL) continue;
        pair->rows[PARAM][r] = none ? work->no_row : (T *)u->param + row * u->param_stride;
        pair->key[r] = mix(mix(u->noise_row + (uint32_t)row) ^ u->noise_key);
    }
}

/* Once a pair of rows has been measured, its weights are known. So its updates, which are still in the
 * cache, are summed with the next pair of rows, while these are on their way from memory. */
static void NAME(weigh_pair)(NAME(Work) *work, PAIR *pair) {
    const Update *u = work->share->update;
    for (int r = 0; r < 2; r++) {
        pair->rows[UPDATE][r] = pair->rows[u->exp_avg == NULL ? GRAD : MOMENT][r];
        if (pair->row[r] < 0)
            pair->weight[r] = 0;
        else if (u->row_sums == NULL)
            pair->weight[r] = 1;
        else
            pair->weight[r] = NAME(weigh)(work->share, pair->row[r], &pair->squares[r]);
        pair->squares[r] = (VECTOR){0};
    }
}

/* Add the sums over some rows to those over all rows, in double precision. */
static void NAME(collect)(NAME(Work) *work) {
    const int64_t size = 2 * work->padded;
    for (int64_t i = 0; i < size; i++) {
        work->total[i] += (double)work->partial[i];
        work->total[i] += (double)work->partial[size + i];
    }
    memset(work->partial, 0, 2 * (size_t)size * sizeof(WIDE));
}

/* Work on one or two pairs of rows, starting with `row` and `run` rows apart, on some columns of each
 * pair at a time. */
static void NAME(over_rows)(NAME(Work) *work, int count, int64_t row, int64_t run) {
    const int64_t columns = work->share->update->columns;
    for (int k = 0; k < count; k++)
        NAME(go_to)(work, &work->pairs[k], row + 2 * k * run, run ? row + (2 * k + 1) * run : -1);
    for (int64_t start = 0; start < columns; start += BLOCK / (int)sizeof(T)) {
        const int64_t block = start + BLOCK / (int)sizeof(T);
        const int64_t stop = block < columns ? block : columns;
        for (int k = 0; k < count; k++)
            for (int loop = 0; loop < 2; loop++)
                if (work->loops[loop] != NULL)
                    NAME(over)(work->loops[loop], &work->pairs[k], start, stop);
    }
    for (int k = 0; work->measures && k < count; k++) NAME(weigh_pair)(work, &work->pairs[k]);
}

/* A pass over a thread's rows, which are divided into `pairs` pairs of runs. */
static void NAME(pass)(Share *share, NAME(Work) *work, int pairs) {
    const int64_t columns = share->update->columns;
    const int64_t padded = (columns + LINE - 1) / LINE * LINE;
    work->share = share;
    work->padded = padded;
    work->partial = zeros(5 * padded * (int64_t)sizeof(WIDE));
    work->total = zeros(2 * padded * (int64_t)sizeof(double));
    work->no_row = zeros(padded * (int64_t)sizeof(T));
    share->failed = work->partial == NULL || work->total == NULL || work->no_row == NULL;
    if (!share->failed) {
        work->no_mean = work->partial + 4 * padded;
        for (int k = 0; k < 2; k++) {
            PAIR *pair = &work->pairs[k];
            pair->update = share->update;
            pair->sums = work->partial + 2 * k * padded;
            pair->update_sums = pair->sums + padded;
            pair->step_size = share->step_size;
            for (int r = 0; r < 2; r++) pair->rows[UPDATE][r] = work->no_row;
        }
        const int64_t run = (share->last - share->first) / (2 * pairs);
        for (int64_t done = 0; done < run; done++) {
            NAME(over_rows)(work, pairs, share->first + done, run);
            if (share->step_size == NULL && done % SUM_ROWS == SUM_ROWS - 1) NAME(collect)(work);
        }
        for (int64_t row = share->first + 2 * pairs * run; row < share->last; row++)
            NAME(over_rows)(work, 1, row, 0);
        if (work->measures && share->update_sums != NULL) /* of the last rows */
            for (int k = 0; k < pairs; k++)
                NAME(over)(NAME(sum_columns), &work->pairs[k], 0, columns);
        NAME(collect)(work);
        for (int64_t i = 0; i < columns; i++) {
            if (share->sums != NULL) share->sums[i] = work->total[NAME(place)(i)];
            if (share->update_sums != NULL)
                share->update_sums[i] = work->total[padded + NAME(place)(i)];
        }
    }
    free(work->partial);
    free(work->total);
    free(work->no_row);
}

static void NAME(measure)(Share *share) {
    const Update *u = share->update;
    NAME(Columns) *loop = NAME(square_columns);
    if (u->update_moment && u->row_sums != NULL)
        loop = NAME(square_rows_moment_columns);
    else if (u->update_moment)
        loop = NAME(square_moment_columns);
    else if (u->row_sums != NULL)
        loop = NAME(square_rows_columns);
    NAME(Columns) *second = share->update_sums != NULL ? NAME(sum_columns) : NULL;
    NAME(pass)(share, &(NAME(Work)){.measures = 1, .moment = u->update_moment, .loops = {loop, second}}, 2);
}

static void NAME(center)(Share *share) {
    const Update *u = share->update;
    const int moment = u->exp_avg != NULL && !u->update_moment;
    NAME(Columns) *loop = moment ? NAME(moment_columns) : NULL;
    NAME(pass)(share, &(NAME(Work)){.moment = moment, .loops = {loop, NAME(sum_columns)}}, 2);
}

static void NAME(apply)(Share *share) {
    const Update *u = share->update;
    const int moment = u->exp_avg != NULL && !u->update_moment;
    NAME(Columns) *loop = moment ? NAME(moment_columns) : NULL;
    NAME(Columns) *update = NAME(update_columns);
#if IS_BFLOAT16
    if (u->stochastic) update = NAME(update_stochastically_columns);
#endif
    NAME(pass)(share, &(NAME(Work)){.moment = moment, .loops = {loop, update}}, APPLY_PAIRS);
}

/* Update nu and its maximum; compute each column's step size, and the mean of the rows' updates, which
 * is 0 without zero_sum. */
__attribute__((unused)) static void NAME(step_sizes)(const Update *u, void *step_sizes, void *means) {
    WIDE *step_size = step_sizes, *mean = means, *nu = u->exp_avg_sq, *maximum = u->max_exp_avg_sq;
    for (int64_t i = 0; i < u->columns; i++) {
        const int64_t place = NAME(place)(i);
        /* A gradient clipped to zero contributes zero, even where its sum has overflowed to inf. */
        const double share = u->share == 0 ? 0 : u->share * u->sums[i];
        nu[i] = (WIDE)(u->beta2 * nu[i] + share);
        WIDE highest = nu[i];
        if (maximum != NULL) { /* as torch.maximum, which propagates NaN */
            if (maximum[i] > highest || maximum[i] != maximum[i]) highest = maximum[i];
            maximum[i] = highest;
        }
        step_size[place] = (WIDE)(u->lr / (sqrt(highest * u->scale) + u->eps));
        mean[place] = u->moment_sums == NULL ? 0 : (WIDE)(u->moment_sums[i] / u->active);
    }
}

#undef LINE
#undef LANES
#undef PARTS
#undef VECTOR
#undef PAIR
#undef ROW
#undef PREFETCH
#undef COLUMNS
#undef T
#undef WIDE
#undef SQRT
#undef IS_BFLOAT16
#undef NAME
