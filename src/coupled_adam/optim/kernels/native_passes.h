/* The passes over a matrix's rows, for one dtype and one instruction set (see native_dtypes.h).
 *
 * Two things make them fast. A core spends its time waiting for cache lines; so a thread divides its
 * rows into runs of adjacent rows that are far apart, works on a row of each run at a time, and
 * prefetches them, which keeps more requests in flight than one stream of rows. And the loops over
 * columns, the functions whose names end in _columns, work on a cache line at a time, with vectors of
 * the processor's size, so that the compiler need not split them (tests/optim/test_vectors.py looks).
 * They take several rows at a time, so that a column's sum or step size is loaded once for all.
 *
 * Results are bit-identical for all instruction sets: the order of every sum is written here, and
 * -ffp-contract is off. They depend on the number of threads.
 */

#define LINE (64 / (int)sizeof(T))     /* elements of a cache line */
#define LANES (64 / (int)sizeof(WIDE)) /* numbers of WIDE as large as a cache line */
#define PARTS (LINE / LANES)           /* as many of them hold a cache line: 2 for bfloat16, otherwise 1 */
#define PIECES (64 / VECTOR_BYTES)     /* vectors of each */
#define VECTORS (PARTS * PIECES)

typedef WIDE NAME(Vector) __attribute__((vector_size(VECTOR_BYTES)));
typedef WIDE NAME(Unaligned) __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(T)), may_alias));
typedef uint32_t NAME(Bits) __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t NAME(UnalignedBits) __attribute__((vector_size(VECTOR_BYTES), aligned(2), may_alias));
typedef int32_t NAME(SignedBits) __attribute__((vector_size(VECTOR_BYTES)));
#define VECTOR NAME(Vector)
#define BITS NAME(Bits)

/* A cache line of bfloat16 is read as 16 numbers of 32 bits. Their lower halves make the first vectors,
 * their upper halves the others: that takes one operation each on every processor, but each vector
 * then holds every other column. All vectors over the columns (sums, step sizes) have this order, in
 * which a column is at this place. */
static int64_t NAME(place)(int64_t column) {
    return column / LINE * LINE + column % PARTS * LANES + column % LINE / PARTS;
}

ALWAYS_INLINE static VECTOR NAME(load)(const T *line, const int vector) {
#if IS_BFLOAT16
    const BITS bits = ((const NAME(UnalignedBits) *)line)[vector % PIECES];
    return (VECTOR)(vector < PIECES ? bits << 16 : bits & 0xffff0000);
#else
    return ((const NAME(Unaligned) *)line)[vector];
#endif
}

/* Round to nearest, ties to even; or, with `noise`, stochastically. */
ALWAYS_INLINE static void NAME(store)(T *line, const VECTOR *values, const BITS *noise) {
#if IS_BFLOAT16
    BITS rounded[VECTORS];
    for (int vector = 0; vector < VECTORS; vector++) {
        const BITS bits = (BITS)values[vector];
        const BITS added = noise ? noise[vector] >> 16 : 0x7fff + ((bits >> 16) & 1);
        /* All ones for NaN, which a carry could turn into another number. (The compiler would compare
         * vectors one number at a time.) */
        const BITS nan = (BITS)((NAME(SignedBits))(0x7f800000 - (bits & 0x7fffffff)) >> 31);
        rounded[vector] = ((bits + added) & ~nan) | (0x7fc00000 & nan);
    }
    for (int piece = 0; piece < PIECES; piece++)
        ((NAME(UnalignedBits) *)line)[piece] =
            (rounded[piece] >> 16) | (rounded[PIECES + piece] & 0xffff0000);
#else
    (void)noise;
    for (int vector = 0; vector < VECTORS; vector++)
        ((NAME(Unaligned) *)line)[vector] = values[vector];
#endif
}

/* All that the loops over columns need to know of some rows. Missing rows are replaced by zeros. */
typedef struct {
    const Update *update;
    /* A row of the gradient, of the first moment and of the parameter, from column `origin` on; and a
     * row of the updates, which are the first moment or, where there is none, the gradient, but for the
     * factor `weight`. */
    T *rows[4][ROWS];
    int64_t origin;
    WIDE weight[ROWS];
    VECTOR squares[ROWS][PIECES]; /* the sums of each row's squares, in lanes */
    WIDE *sums, *update_sums; /* the columns' sums of squares and of updates, over some rows */
    const WIDE *step_size;
    const WIDE *mean[ROWS];   /* the mean update; zeros for a row that must not move */
    uint32_t key[ROWS];       /* of the random numbers */
    int64_t row[ROWS];        /* negative for a row of zeros */
} NAME(Rows);
#define GROUP NAME(Rows)
#define ROW(kind, r) (group->rows[kind][r] + start - group->origin)
#define PREFETCH(line, ahead) __builtin_prefetch((const char *)(line) + (ahead), 0, 2)

/* How the first moment is updated: as torch.lerp does it, old + weight (x - old) if the weight is below
 * 1/2, and otherwise x - (1 - weight) (x - old), so that both ends are exact. The masks select the first
 * term; with a condition, the compiler would test it for each cache line. */
typedef struct {
    WIDE factor, rate;
    BITS old, new;
} NAME(Lerp);

static NAME(Lerp) NAME(lerp_of)(const Update *u, double factor) {
    const WIDE weight = (WIDE)u->weight;
    const uint32_t old = weight < (WIDE)0.5 ? 0xffffffff : 0;
    NAME(Lerp) lerp = {.factor = (WIDE)factor, .rate = old ? weight : weight - 1};
    lerp.old += old;
    lerp.new = ~lerp.old;
    return lerp;
}

/* Update a cache line of the first moment. */
ALWAYS_INLINE static void NAME(lerp)(const NAME(Lerp) *lerp, T *moment, const T *grad) {
    VECTOR values[VECTORS];
    for (int v = 0; v < VECTORS; v++) {
        const VECTOR old = NAME(load)(moment, v), x = lerp->factor * NAME(load)(grad, v);
        const VECTOR start = (VECTOR)(((BITS)old & lerp->old) | ((BITS)x & lerp->new));
        values[v] = start + lerp->rate * (x - old);
    }
    NAME(store)(moment, values, NULL);
}

/* Add the rows' updates to a cache line of their sums. */
ALWAYS_INLINE static void NAME(sum)(WIDE *sums, const T *const *u, const WIDE *weight, int64_t i) {
    for (int v = 0; v < VECTORS; v++) {
        VECTOR update[ROWS];
        for (int r = 0; r < ROWS; r++) update[r] = weight[r] * NAME(load)(u[r] + i, v);
        VECTOR *total = (VECTOR *)(sums + i) + v;
        *total += (update[0] + update[1]) + (update[2] + update[3]);
    }
}

/* Sum the squared gradient over the rows and over the columns. With `moment` also update the first
 * moment; with `sum` also sum the updates over the rows. */
ALWAYS_INLINE static void NAME(square)(GROUP *group, int64_t start, int64_t count, const int moment,
                                       const int sum) {
    const NAME(Lerp) lerp = NAME(lerp_of)(group->update, 1);
    WIDE *sums = group->sums + start, *update_sums = group->update_sums + start;
    const T *g[ROWS], *u[ROWS];
    T *m[ROWS];
    WIDE weights[ROWS];
    VECTOR squares[ROWS][PIECES];
    for (int r = 0; r < ROWS; r++) {
        g[r] = ROW(GRAD, r), m[r] = ROW(MOMENT, r), u[r] = ROW(UPDATE, r);
        weights[r] = group->weight[r];
        for (int piece = 0; piece < PIECES; piece++) squares[r][piece] = group->squares[r][piece];
    }
    for (int64_t i = 0; i < count; i += LINE) {
        for (int v = 0; v < VECTORS; v++) {
            VECTOR square[ROWS];
            for (int r = 0; r < ROWS; r++) {
                const VECTOR x = NAME(load)(g[r] + i, v);
                square[r] = x * x;
                squares[r][v % PIECES] += square[r];
            }
            VECTOR *total = (VECTOR *)(sums + i) + v;
            *total += (square[0] + square[1]) + (square[2] + square[3]);
        }
        for (int r = 0; r < ROWS; r++) {
            PREFETCH(g[r] + i, MEASURE_AHEAD);
            if (moment) PREFETCH(m[r] + i, MEASURE_AHEAD);
            if (moment) NAME(lerp)(&lerp, m[r] + i, g[r] + i);
        }
        if (sum) NAME(sum)(update_sums, u, weights, i);
    }
    for (int r = 0; r < ROWS; r++)
        for (int piece = 0; piece < PIECES; piece++) group->squares[r][piece] = squares[r][piece];
}

/* As constants, the options cost nothing where they are not used. */
typedef void NAME(Columns)(GROUP *group, int64_t start, int64_t count);
#define COLUMNS __attribute__((noinline)) static void
COLUMNS NAME(square_columns)(GROUP *group, int64_t start, int64_t count) {
    NAME(square)(group, start, count, 0, 0);
}
COLUMNS NAME(square_sum_columns)(GROUP *group, int64_t start, int64_t count) {
    NAME(square)(group, start, count, 0, 1);
}
COLUMNS NAME(square_moment_columns)(GROUP *group, int64_t start, int64_t count) {
    NAME(square)(group, start, count, 1, 0);
}
COLUMNS NAME(square_moment_sum_columns)(GROUP *group, int64_t start, int64_t count) {
    NAME(square)(group, start, count, 1, 1);
}

/* Update the first moment. */
COLUMNS NAME(moment_columns)(GROUP *group, int64_t start, int64_t count) {
    const NAME(Lerp) lerp = NAME(lerp_of)(group->update, group->update->factor);
    for (int r = 0; r < ROWS && group->rows[MOMENT][r] != NULL; r++) {
        const T *g = ROW(GRAD, r);
        T *m = ROW(MOMENT, r);
        for (int64_t i = 0; i < count; i += LINE) {
            PREFETCH(g + i, APPLY_AHEAD);
            PREFETCH(m + i, APPLY_AHEAD);
            NAME(lerp)(&lerp, m + i, g + i);
        }
    }
}

/* Sum the updates over the rows. */
COLUMNS NAME(sum_columns)(GROUP *group, int64_t start, int64_t count) {
    WIDE *sums = group->update_sums + start;
    const T *u[ROWS];
    WIDE weights[ROWS];
    for (int r = 0; r < ROWS; r++) u[r] = ROW(UPDATE, r), weights[r] = group->weight[r];
    for (int64_t i = 0; i < count; i += LINE) {
        for (int r = 0; r < ROWS; r++) PREFETCH(u[r] + i, MEASURE_AHEAD);
        NAME(sum)(sums, u, weights, i);
    }
}

/* Update the parameter. */
ALWAYS_INLINE static void NAME(update)(GROUP *group, int64_t start, int64_t count,
                                       const int stochastic) {
    (void)stochastic;
    const WIDE decay = (WIDE)group->update->decay, weight[2] = {group->weight[0], group->weight[1]};
    const WIDE *step_sizes = group->step_size + start;
    const WIDE *means[2] = {group->mean[0] + start, group->mean[1] + start};
    const T *u[2] = {ROW(UPDATE, 0), ROW(UPDATE, 1)};
    T *p[2] = {ROW(PARAM, 0), ROW(PARAM, 1)};
    for (int64_t i = 0; i < count; i += LINE) {
        for (int r = 0; r < 2; r++) {
            PREFETCH(u[r] + i, APPLY_AHEAD);
            PREFETCH(p[r] + i, APPLY_AHEAD);
            VECTOR values[VECTORS];
            for (int v = 0; v < VECTORS; v++) {
                const VECTOR *step_size = (const VECTOR *)(step_sizes + i) + v;
                const VECTOR *mean = (const VECTOR *)(means[r] + i) + v;
                const VECTOR step = weight[r] * NAME(load)(u[r] + i, v) - *mean;
                values[v] = decay * NAME(load)(p[r] + i, v) - *step_size * step;
            }
#if IS_BFLOAT16
            if (stochastic) {
                const uint32_t column = group->update->noise_column + (uint32_t)(start + i);
                BITS noise[VECTORS];
                for (int v = 0; v < VECTORS; v++) {
                    const BITS *even_columns = (const BITS *)EVEN_COLUMNS + v % PIECES;
                    BITS x = (*even_columns + (column + (uint32_t)(v / PIECES))) ^ group->key[r];
                    x = (x ^ (x >> 16)) * 0x85ebca6b; /* mix */
                    x = (x ^ (x >> 13)) * 0xc2b2ae35;
                    noise[v] = x ^ (x >> 16);
                }
                NAME(store)(p[r] + i, values, noise);
                continue;
            }
#endif
            NAME(store)(p[r] + i, values, NULL);
        }
    }
}

COLUMNS NAME(update_columns)(GROUP *group, int64_t start, int64_t count) {
    NAME(update)(group, start, count, 0);
}
#if IS_BFLOAT16
COLUMNS NAME(update_stochastically_columns)(GROUP *group, int64_t start, int64_t count) {
    NAME(update)(group, start, count, 1);
}
#endif

/* Run a loop over the columns from `start` to `stop`; over the last ones, fewer than a cache line, in
 * a copy that is filled up with zeros. */
static void NAME(over)(NAME(Columns) *columns, GROUP *group, int64_t start, int64_t stop) {
    const int64_t whole = (stop - start) / LINE * LINE, rest = stop - start - whole;
    columns(group, start, whole);
    if (rest == 0) return;
    start += whole;
    T lines[4][ROWS][LINE] = {0};
    GROUP copy = *group;
    copy.origin = start;
    for (int kind = 0; kind < 4; kind++)
        for (int r = 0; r < ROWS; r++) {
            copy.rows[kind][r] = lines[kind][r];
            if (group->rows[kind][r] != NULL)
                memcpy(lines[kind][r], ROW(kind, r), (size_t)rest * sizeof(T));
        }
    columns(&copy, start, LINE);
    for (int r = 0; r < ROWS; r++) {
        memcpy(group->squares[r], copy.squares[r], sizeof copy.squares[r]);
        for (int kind = MOMENT; kind <= PARAM; kind++)
            if (group->rows[kind][r] != NULL)
                memcpy(ROW(kind, r), lines[kind][r], (size_t)rest * sizeof(T));
    }
}

/* r^-exponent, and 0 for a row that never had a gradient. Square roots are the same everywhere, unlike
 * pow, and faster: r^-3/8 is 1 / (r^1/4 r^1/8). */
ALWAYS_INLINE static WIDE NAME(weight)(WIDE r, double exponent) {
    if (r == 0) return 0;
    const int eighths = (int)(exponent * 8);
    if (eighths != exponent * 8 || eighths < 0 || eighths > 7) return (WIDE)pow(r, -exponent);
    WIDE root = SQRT(r), product = 1;
    if (eighths & 4) product = root;
    if (eighths & 3) {
        root = SQRT(root);
        if (eighths & 2) product *= root;
        if (eighths & 1) product *= SQRT(root);
    }
    return 1 / product;
}

/* The sum of the lanes of a row's squares, always in the same order. */
ALWAYS_INLINE static WIDE NAME(add_lanes)(const VECTOR *lanes) {
    typedef WIDE Half __attribute__((vector_size(32)));
    typedef WIDE Quarter __attribute__((vector_size(16)));
    Half halves[2];
    memcpy(halves, lanes, sizeof halves); /* PIECES vectors */
    const Half half = halves[0] + halves[1];
    Quarter quarters[2];
    memcpy(quarters, &half, sizeof quarters);
    const Quarter quarter = quarters[0] + quarters[1];
    if (LANES == 8) return quarter[0] + quarter[1];
    return (quarter[0] + quarter[LANES / 8]) + (quarter[1] + quarter[LANES / 4 - 1]);
}

/* What a thread does in a pass. */
typedef struct {
    Share *share;
    NAME(Columns) *loops[2]; /* over columns; NULL if there is nothing to do */
    int measures, moment;    /* whether it measures, and whether it updates the first moment */
    int count;               /* rows at a time */
    T *no_row;               /* zeros */
    WIDE *no_mean;           /* zeros, the mean for a row that must not move */
    double *total;           /* sums and update sums over all rows */
    GROUP group;
} NAME(Work);

/* Go to the rows `row`, `row + run`, `row + 2 run`, ..., as far as they are below `last`. */
static void NAME(go_to)(NAME(Work) *work, int64_t row, int64_t run, int64_t last) {
    const Share *share = work->share;
    const Update *u = share->update;
    GROUP *group = &work->group;
    for (int r = 0; r < work->count; r++, row += run) {
        const int none = row >= last;
        group->row[r] = none ? -1 : row;
        T *g = none ? work->no_row : (T *)u->grad + row * u->grad_stride;
        T *m = none || u->exp_avg == NULL ? work->no_row : (T *)u->exp_avg + row * u->exp_avg_stride;
        group->rows[GRAD][r] = g;
        if (work->moment) group->rows[MOMENT][r] = m;
        if (work->measures) continue;
        group->rows[UPDATE][r] = u->exp_avg == NULL ? g : m;
        group->weight[r] = none ? 0 : u->weights == NULL ? 1 : ((const WIDE *)u->weights)[row];
        group->mean[r] = group->weight[r] == 0 ? work->no_mean : share->mean;
        if (u->exp_avg == NULL) group->weight[r] *= (WIDE)u->factor;
        if (share->step_size == NULL) continue;
        group->rows[PARAM][r] = none ? work->no_row : (T *)u->param + row * u->param_stride;
        group->key[r] = mix(mix(u->noise_row + (uint32_t)row) ^ u->noise_key);
    }
}

/* When rows have been measured, their weights are known. So their updates, which are still in the
 * cache, are summed together with the next rows, while these are on their way from memory. */
static void NAME(weigh_rows)(NAME(Work) *work) {
    const Update *u = work->share->update;
    GROUP *group = &work->group;
    for (int r = 0; r < ROWS; r++) {
        const int64_t row = group->row[r];
        group->rows[UPDATE][r] = group->rows[u->exp_avg == NULL ? GRAD : MOMENT][r];
        group->weight[r] = row >= 0;
        const WIDE sum = NAME(add_lanes)(group->squares[r]);
        memset(group->squares[r], 0, sizeof group->squares[r]);
        if (row < 0 || u->row_sums == NULL) continue;
        ((WIDE *)u->row_sums)[row] = sum;
        if (u->exp_avg_sq_row == NULL) continue;
        const WIDE before = ((const WIDE *)u->exp_avg_sq_row)[row];
        const WIDE weight = NAME(weight)((WIDE)(u->beta2 * before + u->row_share * sum), u->exponent);
        ((WIDE *)u->weights)[row] = group->weight[r] = weight;
        work->share->active += weight != 0;
    }
}

/* Add the sums over some rows to those over all rows, in double precision. */
static void NAME(collect)(NAME(Work) *work) {
    const int64_t size = 2 * work->share->padded;
    double *restrict total = work->total;
    WIDE *restrict sums = work->group.sums;
    for (int64_t i = 0; i < size; i++) {
        total[i] += (double)sums[i];
        sums[i] = 0;
    }
}

/* Work on rows that are `run` rows apart, block by block, so that the second loop finds in the cache
 * what the first has written. */
static void NAME(over_rows)(NAME(Work) *work, int64_t row, int64_t run, int64_t last) {
    const int64_t columns = work->share->update->columns;
    const int64_t block = work->loops[0] == NULL || work->loops[1] == NULL ? columns : BLOCK / (int64_t)sizeof(T);
    NAME(go_to)(work, row, run, last);
    for (int64_t start = 0; start < columns; start += block) {
        const int64_t stop = start + block < columns ? start + block : columns;
        for (int loop = 0; loop < 2; loop++)
            if (work->loops[loop] != NULL)
                NAME(over)(work->loops[loop], &work->group, start, stop);
    }
    if (work->measures) NAME(weigh_rows)(work);
}

/* A pass over a thread's rows, which are divided into `count` runs. */
static void NAME(pass)(NAME(Work) *work) {
    Share *share = work->share;
    const Update *u = share->update;
    const int sums = share->step_size == NULL;
    const int64_t size = share->padded;
    memset(share->memory, 0, (size_t)(sums ? 6 : 2) * (size_t)size * sizeof(double));
    work->no_row = (T *)share->memory;
    work->no_mean = (WIDE *)(share->memory + size);
    work->total = share->memory + 2 * size;
    GROUP *group = &work->group;
    group->update = u;
    group->step_size = share->step_size;
    group->sums = (WIDE *)(share->memory + 4 * size);
    group->update_sums = group->sums + size;
    for (int r = 0; r < ROWS; r++) group->rows[UPDATE][r] = work->no_row;

    const int64_t run = (share->last - share->first) / work->count;
    for (int64_t done = 0; done < run; done++) {
        NAME(over_rows)(work, share->first + done, run, share->last);
        if (sums && done % SUM_ROWS == SUM_ROWS - 1) NAME(collect)(work);
    }
    const int64_t rest = share->first + work->count * run;
    if (rest < share->last) NAME(over_rows)(work, rest, 1, share->last);
    if (!sums) return;
    if (work->measures && share->update_sums != NULL) /* of the last rows */
        NAME(over)(NAME(sum_columns), group, 0, u->columns);
    NAME(collect)(work);
    for (int64_t i = 0; i < u->columns; i++) {
        const int64_t place = NAME(place)(i);
        if (share->sums != NULL) share->sums[i] = work->total[place];
        if (share->update_sums != NULL) share->update_sums[i] = work->total[size + place];
    }
}

static void NAME(measure)(Share *share) {
    const int moment = share->update->update_moment, sum = share->update_sums != NULL;
    NAME(Work) work = {.share = share, .measures = 1, .moment = moment, .count = ROWS};
    if (moment)
        work.loops[0] = sum ? NAME(square_moment_sum_columns) : NAME(square_moment_columns);
    else
        work.loops[0] = sum ? NAME(square_sum_columns) : NAME(square_columns);
    NAME(pass)(&work);
}

static void NAME(center)(Share *share) {
    const Update *u = share->update;
    NAME(Work) work = {.share = share, .count = ROWS};
    work.moment = u->exp_avg != NULL && !u->update_moment;
    if (work.moment) work.loops[0] = NAME(moment_columns);
    work.loops[1] = NAME(sum_columns);
    NAME(pass)(&work);
}

static void NAME(apply)(Share *share) {
    const Update *u = share->update;
    NAME(Work) work = {.share = share, .count = 2};
    work.moment = u->exp_avg != NULL && !u->update_moment;
    if (work.moment) work.loops[0] = NAME(moment_columns);
    work.loops[1] = NAME(update_columns);
#if IS_BFLOAT16
    if (u->stochastic) work.loops[1] = NAME(update_stochastically_columns);
#endif
    NAME(pass)(&work);
}

/* Update nu and its maximum; compute each column's step size, and the mean of the rows' updates, which
 * is 0 without zero_sum. */
static void NAME(step_sizes)(const Update *u, void *step_sizes, void *means) {
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
#undef PIECES
#undef VECTORS
#undef VECTOR
#undef BITS
#undef GROUP
#undef ROW
#undef PREFETCH
#undef COLUMNS
#undef T
#undef WIDE
#undef SQRT
#undef IS_BFLOAT16
#undef NAME
