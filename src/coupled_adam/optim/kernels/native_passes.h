/* The passes over a matrix's rows, for one dtype and one instruction set (see native_dtypes.h).
 *
 * Two things make them fast. A core spends its time waiting for cache lines; so a thread divides its
 * rows into runs of adjacent rows that are far apart, works on a row of each run at a time, and
 * prefetches them, which keeps more requests in flight than one stream of rows. And the loops over
 * columns, the functions whose names end in _columns, work on a cache line at a time, with vectors of
 * the processor's size, so that the compiler need not split them.
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
#define LANES_OF_ROWS (ROWS * PIECES)

typedef WIDE NAME(Vector) __attribute__((vector_size(VECTOR_BYTES)));
typedef WIDE NAME(Unaligned) __attribute__((vector_size(VECTOR_BYTES), aligned(sizeof(T)), may_alias));
typedef uint32_t NAME(Bits) __attribute__((vector_size(VECTOR_BYTES)));
typedef uint32_t NAME(UnalignedBits) __attribute__((vector_size(VECTOR_BYTES), aligned(2), may_alias));
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

/* A NaN of a state may have all bits set, as CUDA makes it; here it becomes one of arithmetic. */
static WIDE NAME(quiet)(double x) { return x != x ? (WIDE)NAN : (WIDE)x; }

/* Round to nearest, ties to even; or, with `noise`, stochastically. A NaN stays one: the lower half of
 * those of bfloat16, and of those that arithmetic makes, is 0, so that nothing is carried. */
ALWAYS_INLINE static void NAME(store)(T *line, const VECTOR *values, const BITS *noise) {
#if IS_BFLOAT16
    BITS rounded[VECTORS];
    for (int vector = 0; vector < VECTORS; vector++) {
        const BITS bits = (BITS)values[vector];
        const BITS added = noise ? noise[vector] >> 16 : 0x7fff + ((bits >> 16) & 1);
        rounded[vector] = bits + added;
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

static WIDE NAME(wide)(T x) {
#if IS_BFLOAT16
    const uint32_t bits = (uint32_t)x << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
#else
    return x;
#endif
}

static T NAME(narrow)(WIDE x) {
#if IS_BFLOAT16
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    return (T)((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
#else
    return x;
#endif
}

/* Add up some columns of rows with the same number, from the first row to the last. */
#define AT_A_TIME 256
ALWAYS_INLINE static void NAME(add_columns)(const Duplicates *d, int64_t i, int64_t start, const int64_t count) {
    WIDE sum[AT_A_TIME];
    for (int64_t k = d->first[i]; k < d->first[i + 1]; k++) {
        const T *row = (const T *)d->values + d->order[k] * d->columns + start;
        if (k == d->first[i])
            for (int64_t j = 0; j < count; j++) sum[j] = NAME(wide)(row[j]);
        else
            for (int64_t j = 0; j < count; j++) sum[j] += NAME(wide)(row[j]);
    }
    T *out = (T *)d->out + i * d->columns + start;
    for (int64_t j = 0; j < count; j++) out[j] = NAME(narrow)(sum[j]);
}

/* The sums of rows with the same number; one in bfloat16 is rounded once. */
static void NAME(add)(const Duplicates *d, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; i++) {
        const int64_t ahead = d->first[i] + 1 + FAR_AHEAD / (d->columns * (int64_t)sizeof(T) + 64);
        if (ahead < d->first[end]) {
            const T *later = (const T *)d->values + d->order[ahead] * d->columns;
            for (int64_t j = 0; j < d->columns; j += LINE) __builtin_prefetch(later + j);
        }
        if (d->first[i + 1] - d->first[i] == 1) {
            const T *row = (const T *)d->values + d->order[d->first[i]] * d->columns;
            memcpy((T *)d->out + i * d->columns, row, (size_t)d->columns * sizeof(T));
            continue;
        }
        int64_t start = 0;
        for (; start + AT_A_TIME <= d->columns; start += AT_A_TIME)
            NAME(add_columns)(d, i, start, AT_A_TIME);
        if (start < d->columns) NAME(add_columns)(d, i, start, d->columns - start);
    }
}
#undef AT_A_TIME

/* All that the loops over columns need to know of some rows. */
typedef struct {
    const Update *update;
    T *rows[KINDS][ROWS];         /* from the loop's first column on; NULL where there is nothing to do */
    uint32_t key[ROWS];           /* of the random numbers */
    /* Of Coupled Adam, in which missing rows are replaced by zeros. */
    WIDE *sums;                   /* the columns' sums of squares, over some rows */
    const WIDE *step_size;
    /* Of LEAN. */
    VECTOR squares[2 * LANES_OF_ROWS]; /* the sums of the next rows' squares, and their moments', in lanes */
    WIDE *vectors;                   /* over the columns, a cache line of each after the other */
    WIDE rate[ROWS];                 /* of the row: its weight times lr, and without momentum times factor */
    WIDE moves[ROWS];                /* 1, or 0 for a row that must not move */
} NAME(Rows);
#define GROUP NAME(Rows)
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

ALWAYS_INLINE static VECTOR NAME(lerp)(const NAME(Lerp) *lerp, VECTOR old, VECTOR gradient) {
    const VECTOR x = lerp->factor * gradient;
    const VECTOR start = (VECTOR)(((BITS)old & lerp->old) | ((BITS)x & lerp->new));
    return start + lerp->rate * (x - old);
}

/* Update a cache line of the first moment. */
ALWAYS_INLINE static void NAME(update_moment)(const NAME(Lerp) *lerp, T *moment, const T *grad) {
    VECTOR values[VECTORS];
    for (int v = 0; v < VECTORS; v++)
        values[v] = NAME(lerp)(lerp, NAME(load)(moment, v), NAME(load)(grad, v));
    NAME(store)(moment, values, NULL);
}

/* Sum the squared gradient over the rows. With `moment` also update the first moment. */
ALWAYS_INLINE static void NAME(square)(GROUP *group, int64_t start, int64_t count, const int moment) {
    const NAME(Lerp) lerp = NAME(lerp_of)(group->update, 1);
    WIDE *sums = group->sums + start;
    const T *g[ROWS];
    T *m[ROWS];
    for (int r = 0; r < ROWS; r++) g[r] = group->rows[GRAD][r], m[r] = group->rows[MOMENT][r];
    for (int64_t i = 0; i < count; i += LINE) {
        for (int v = 0; v < VECTORS; v++) {
            VECTOR square[ROWS];
            for (int r = 0; r < ROWS; r++) {
                const VECTOR x = NAME(load)(g[r] + i, v);
                square[r] = x * x;
            }
            VECTOR *total = (VECTOR *)(sums + i) + v;
            *total += (square[0] + square[1]) + (square[2] + square[3]);
        }
        for (int r = 0; r < ROWS; r++) {
            PREFETCH(g[r] + i, SUM_AHEAD);
            if (moment) PREFETCH(m[r] + i, SUM_AHEAD);
            if (moment) NAME(update_moment)(&lerp, m[r] + i, g[r] + i);
        }
    }
}

/* As constants, the options cost nothing where they are not used. */
typedef void NAME(Columns)(GROUP *group, int64_t start, int64_t count);
#define COLUMNS __attribute__((noinline)) static void
COLUMNS NAME(square_columns)(GROUP *group, int64_t start, int64_t count) {
    NAME(square)(group, start, count, 0);
}
COLUMNS NAME(square_moment_columns)(GROUP *group, int64_t start, int64_t count) {
    NAME(square)(group, start, count, 1);
}

/* Store a cache line of a row of the parameter, whose first column is `column`. */
ALWAYS_INLINE static void NAME(store_param)(T *line, const VECTOR *values, const int stochastic,
                                            uint32_t column, uint32_t key) {
    BITS noise[VECTORS];
    for (int v = 0; stochastic && v < VECTORS; v++) {
        const BITS *even_columns = (const BITS *)EVEN_COLUMNS + v % PIECES;
        BITS x = (*even_columns + (column + (uint32_t)(v / PIECES))) ^ key;
        x = (x ^ (x >> 16)) * 0x85ebca6b; /* mix */
        x = (x ^ (x >> 13)) * 0xc2b2ae35;
        noise[v] = x ^ (x >> 16);
    }
    NAME(store)(line, values, stochastic ? noise : NULL);
}

/* Update the parameter by the first moment or, without one, by the gradient. With `moment` update the
 * first moment before. */
ALWAYS_INLINE static void NAME(update)(GROUP *group, int64_t start, int64_t count, const int moment,
                                       const int stochastic) {
    const Update *update = group->update;
    const NAME(Lerp) lerp = NAME(lerp_of)(update, update->factor);
    const int kind = update->exp_avg == NULL ? GRAD : MOMENT;
    const WIDE decay = (WIDE)update->decay, factor = kind == GRAD ? (WIDE)update->factor : 1;
    const WIDE *step_sizes = group->step_size + start;
    T *const *g = group->rows[GRAD], *const *u = group->rows[kind], *const *p = group->rows[PARAM];
    for (int64_t i = 0; i < count; i += LINE) {
        for (int r = 0; r < 2; r++) {
            if (moment) PREFETCH(g[r] + i, APPLY_AHEAD);
            PREFETCH(u[r] + i, APPLY_AHEAD);
            PREFETCH(p[r] + i, APPLY_AHEAD);
            if (moment) NAME(update_moment)(&lerp, u[r] + i, g[r] + i);
            VECTOR values[VECTORS];
            for (int v = 0; v < VECTORS; v++) {
                const VECTOR *step_size = (const VECTOR *)(step_sizes + i) + v;
                const VECTOR step = factor * NAME(load)(u[r] + i, v);
                values[v] = decay * NAME(load)(p[r] + i, v) - *step_size * step;
            }
            const uint32_t column = update->noise_column + (uint32_t)(start + i);
            NAME(store_param)(p[r] + i, values, stochastic, column, group->key[r]);
        }
    }
}

#define UPDATE_COLUMNS(name, moment, stochastic)                             \
    COLUMNS NAME(name)(GROUP *group, int64_t start, int64_t count) {         \
        NAME(update)(group, start, count, moment, stochastic);               \
    }
UPDATE_COLUMNS(update_columns, 0, 0)
UPDATE_COLUMNS(update_stochastically_columns, 0, 1)
UPDATE_COLUMNS(update_moment_columns, 1, 0)
UPDATE_COLUMNS(update_moment_stochastically_columns, 1, 1)

/* Run a loop over the columns; over the last ones, fewer than a cache line, in a copy that is filled up
 * with zeros. */
static void NAME(over)(NAME(Columns) *columns, GROUP *group) {
    const int64_t whole = group->update->columns / LINE * LINE, rest = group->update->columns - whole;
    columns(group, 0, whole);
    if (rest == 0) return;
    T lines[KINDS][ROWS][LINE] = {0};
    GROUP copy = *group;
    for (int kind = 0; kind < KINDS; kind++)
        for (int r = 0; r < ROWS; r++) {
            copy.rows[kind][r] = lines[kind][r];
            if (group->rows[kind][r] != NULL)
                memcpy(lines[kind][r], group->rows[kind][r] + whole, (size_t)rest * sizeof(T));
        }
    columns(&copy, whole, LINE);
    memcpy(group->squares, copy.squares, sizeof copy.squares);
    for (int kind = MOMENT; kind <= PARAM; kind++) /* those that are written */
        for (int r = 0; r < ROWS; r++)
            if (group->rows[kind][r] != NULL)
                memcpy(group->rows[kind][r] + whole, lines[kind][r], (size_t)rest * sizeof(T));
}

/* r^-exponent. Square roots are the same everywhere, unlike pow, and faster: r^-3/8 is
 * 1 / (r^1/4 r^1/8). */
ALWAYS_INLINE static WIDE NAME(power)(WIDE r, double exponent) {
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
    NAME(Columns) *columns;  /* its loop over columns */
    int count;               /* rows at a time */
    int is_update;           /* of the parameter; otherwise the pass only sums */
    T *no_row, *no_param;    /* zeros, and what stands for a missing row of what is written */
    double *total;           /* sums over all rows */
    int64_t active;          /* LEAN's rows that move */
    double per_rho, limit_share; /* of LEAN; times r is r / rho, and times a row's sum in units is its q */
    GROUP group;
} NAME(Work);

/* The memory, all zeros: up to four vectors for the loops, two for the totals, two rows. */
static NAME(Work) NAME(begin)(Share *share, int count, int is_update) {
    const int64_t size = share->padded;
    memset(share->memory, 0, 8 * (size_t)size * sizeof(double));
    return (NAME(Work)){.share = share,
                        .count = count,
                        .is_update = is_update,
                        .total = share->memory + 4 * size,
                        .no_row = (T *)(share->memory + 6 * size),
                        .no_param = (T *)(share->memory + 7 * size),
                        .group = {.update = share->update}};
}

/* The row of param and r that a row of grad belongs to. */
ALWAYS_INLINE static int64_t NAME(row_of_table)(const Update *u, int64_t row) {
    return u->touched == NULL ? row : u->touched[row];
}

/* Go to the rows `row`, `row + run`, `row + 2 run`, ..., as far as they are this thread's. */
static void NAME(go_to)(NAME(Work) *work, int64_t row, int64_t run) {
    const Update *u = work->share->update;
    GROUP *group = &work->group;
    for (int r = 0; r < work->count; r++, row += run) {
        const int is_row = row < work->share->last;
        group->rows[GRAD][r] = is_row ? (T *)u->grad + row * u->grad_stride : work->no_row;
        if (u->exp_avg != NULL)
            group->rows[MOMENT][r] = is_row ? (T *)u->exp_avg + row * u->exp_avg_stride : work->no_param;
        if (!work->is_update) continue;
        const int64_t at = is_row ? NAME(row_of_table)(u, row) : 0;
        group->rows[PARAM][r] = is_row ? (T *)u->param + at * u->param_stride : work->no_param;
        if (u->stochastic) group->key[r] = mix(mix(u->noise_row + (uint32_t)at) ^ u->noise_key);
    }
}

/* Add the sums over some rows to those over all rows, in double precision. */
static void NAME(collect)(NAME(Work) *work) {
    double *restrict total = work->total;
    WIDE *restrict sums = work->group.sums;
    for (int64_t i = 0; i < work->share->padded; i++) {
        total[i] += (double)sums[i];
        sums[i] = 0;
    }
}

/* Work on runs of `run` adjacent rows, the first of which begins at the row `first`. */
typedef void NAME(Runs)(NAME(Work) *work, int64_t first, int64_t run);
static void NAME(runs)(NAME(Work) *work, int64_t first, int64_t run) {
    for (int64_t done = 0; done < run; done++) {
        NAME(go_to)(work, first + done, run);
        NAME(over)(work->columns, &work->group);
        if (!work->is_update && done % SUM_ROWS == SUM_ROWS - 1) NAME(collect)(work);
    }
}

/* A pass over a thread's rows: runs that are far apart, and then the rest, each a run of one row. */
static void NAME(pass)(NAME(Work) *work, NAME(Runs) *runs) {
    const Share *share = work->share;
    const int64_t run = (share->last - share->first) / work->count, rest = share->first + work->count * run;
    if (run > 0) runs(work, share->first, run);
    if (rest < share->last) runs(work, rest, 1);
}

static void NAME(sum_squares)(Share *share) {
    const Update *u = share->update;
    NAME(Work) work = NAME(begin)(share, ROWS, 0);
    work.columns = u->update_moment ? NAME(square_moment_columns) : NAME(square_columns);
    work.group.sums = (WIDE *)share->memory;
    NAME(pass)(&work, NAME(runs));
    NAME(collect)(&work);
    for (int64_t i = 0; i < u->columns; i++) share->sums[i] = work.total[NAME(place)(i)];
}

static void NAME(apply)(Share *share) {
    const Update *u = share->update;
    NAME(Columns) *const columns[2][2] = {
        {NAME(update_columns), NAME(update_stochastically_columns)},
        {NAME(update_moment_columns), NAME(update_moment_stochastically_columns)}};
    NAME(Work) work = NAME(begin)(share, 2, 1);
    work.columns = columns[u->exp_avg != NULL && !u->update_moment][u->stochastic];
    work.group.step_size = share->step_size;
    NAME(pass)(&work, NAME(runs));
}

/* Update nu and its maximum; compute each column's step size. */
static void NAME(step_sizes)(const Update *u, void *step_sizes) {
    WIDE *step_size = step_sizes, *nu = u->exp_avg_sq, *maximum = u->max_exp_avg_sq;
    for (int64_t i = 0; i < u->columns; i++) {
        /* A gradient scaled to zero contributes zero, even where its sum has overflowed to inf. */
        const double share = u->share == 0 ? 0 : u->share * u->sums[i];
        nu[i] = (WIDE)(u->beta2 * nu[i] + share);
        WIDE highest = nu[i];
        if (maximum != NULL) { /* as torch.maximum, which propagates NaN */
            if (maximum[i] > highest || maximum[i] != maximum[i]) highest = maximum[i];
            maximum[i] = highest;
        }
        step_size[NAME(place)(i)] = NAME(quiet)(u->lr / (sqrt(highest * u->scale) + u->eps));
    }
}

/* LEAN, one pass. A row's weight must be known before the row is updated, so its squares are summed
 * first. That a row is read twice costs nothing if the second time it is in the cache, and if the two
 * sweeps alternate column by column: while a row is updated, the squares of the next are summed, and
 * gradient and parameter stream at the same rate. */
#define OF(kind) (VECTORS_OF_LEAN * LINE * (i / LINE) + (kind) * LINE)

/* Add the squares of a vector of the next row, and those of its moment after the step (or without one,
 * of the gradient) in the columns' units. A column's unit is squared apart from the moment, which takes
 * one operation for all rows, and times UNIT, so that the square does not overflow for any nu. */
#define UNIT 0x1p-12f
ALWAYS_INLINE static void NAME(square_next)(const GROUP *group, const NAME(Lerp) *lerp,
                                            VECTOR *squares, VECTOR scale, int64_t i,
                                            const int r, const int v, const int moment) {
    const VECTOR gradient = NAME(load)(group->rows[NEXT][r] + i, v);
    VECTOR m = gradient;
    if (moment) m = NAME(lerp)(lerp, NAME(load)(group->rows[NEXT_MOMENT][r] + i, v), gradient);
    VECTOR *lanes = squares + r * PIECES + v % PIECES;
    lanes[0] += gradient * gradient;
    scale *= UNIT;
    lanes[LANES_OF_ROWS] += m * m * (scale * scale);
}

ALWAYS_INLINE static void NAME(lean)(GROUP *group, const Update *u, WIDE *restrict vectors,
                                     int64_t start, int64_t count, const int moment,
                                     const int stochastic) {
    const NAME(Lerp) lerp = NAME(lerp_of)(u, u->factor);
    const WIDE decay = (WIDE)u->decay;
    /* Rows of a table that are touched do not lie side by side; see lean_go_to_next. */
    const int64_t param_ahead = u->touched == NULL ? LEAN_AHEAD : 0;
    /* In copies, which the compiler keeps in registers: stores could change the group. */
    T *grads[ROWS], *nexts[ROWS], *params[ROWS];
    WIDE rates[ROWS], moves[ROWS];
    VECTOR next_squares[2 * LANES_OF_ROWS];
    for (int r = 0; r < ROWS; r++) {
        grads[r] = group->rows[GRAD][r], nexts[r] = group->rows[NEXT][r];
        params[r] = group->rows[PARAM][r];
        rates[r] = group->rate[r], moves[r] = group->moves[r];
    }
    for (int i = 0; i < 2 * LANES_OF_ROWS; i++) next_squares[i] = group->squares[i];
    for (int64_t i = 0; i < count; i += LINE) {
        VECTOR updates[VECTORS], squares[VECTORS];
        for (int v = 0; v < VECTORS; v++) {
            updates[v] = ((const VECTOR *)(vectors + OF(UPDATES)))[v];
            squares[v] = ((const VECTOR *)(vectors + OF(SQUARES)))[v];
        }
        for (int r = 0; r < ROWS; r++) {
            const T *g = grads[r] + i, *next = nexts[r] + i;
            const T *m = moment ? group->rows[MOMENT][r] + i : g;
            T *p = params[r] + i;
            PREFETCH(next, LEAN_AHEAD);
            PREFETCH(p, param_ahead);
            if (moment) {
                PREFETCH(group->rows[NEXT_MOMENT][r] + i, LEAN_AHEAD);
                NAME(update_moment)(&lerp, group->rows[MOMENT][r] + i, g);
            }
            VECTOR values[VECTORS];
            for (int v = 0; v < VECTORS; v++) {
                const VECTOR scale = ((const VECTOR *)(vectors + OF(SCALE)))[v];
                const VECTOR mean = ((const VECTOR *)(vectors + OF(MEAN)))[v];
                const VECTOR gradient = NAME(load)(g, v);
                const VECTOR update = rates[r] * (scale * NAME(load)(m, v));
                updates[v] += update;
                squares[v] += gradient * gradient;
                values[v] = decay * NAME(load)(p, v) - (update - moves[r] * mean);
                NAME(square_next)(group, &lerp, next_squares, scale, i, r, v, moment);
            }
            const uint32_t column = u->noise_column + (uint32_t)(start + i);
            NAME(store_param)(p, values, stochastic, column, group->key[r]);
        }
        for (int v = 0; v < VECTORS; v++) {
            ((VECTOR *)(vectors + OF(UPDATES)))[v] = updates[v];
            ((VECTOR *)(vectors + OF(SQUARES)))[v] = squares[v];
        }
    }
    for (int i = 0; i < 2 * LANES_OF_ROWS; i++) group->squares[i] = next_squares[i];
}

#define LEAN_COLUMNS(name, moment, stochastic)                                               \
    COLUMNS NAME(name)(GROUP *group, int64_t start, int64_t count) {                         \
        NAME(lean)(group, group->update, group->vectors + VECTORS_OF_LEAN * start, start,    \
                   count, moment, stochastic);                                               \
    }
LEAN_COLUMNS(lean_columns, 0, 0)
LEAN_COLUMNS(lean_stochastically_columns, 0, 1)
LEAN_COLUMNS(lean_moment_columns, 1, 0)
LEAN_COLUMNS(lean_moment_stochastically_columns, 1, 1)

/* log rho before its bias correction: the columns' mean distance from `center`, in log nu. */
static double NAME(mean_log)(const Update *u, double center, double limit) {
    const WIDE *nu = u->exp_avg_sq;
    double sum = 0;
    int64_t known = 0;
    for (int64_t j = 0; j < u->columns; j++) {
        if (nu[j] == 0 || isinf(nu[j])) continue;
        const double distance = log(nu[j]) - center;
        sum += distance > limit ? limit : distance < -limit ? -limit : distance;
        known++;
    }
    return known ? sum / (double)known : 0;
}

static double NAME(rho)(const Update *u) {
    const double center = NAME(mean_log)(u, 0, INFINITY);
    return exp(center + NAME(mean_log)(u, center, u->log_limit)) / u->nu_correction;
}

/* Update a row's r from its squares; return r / rho, or 0 for a row that does not move. */
ALWAYS_INLINE static WIDE NAME(lean_row)(NAME(Work) *work, int64_t row, const int group_row) {
    const Update *u = work->share->update;
    const int64_t at = NAME(row_of_table)(u, row);
    WIDE *r = (WIDE *)u->row_exp_avg_sq + at;
    double old = *r;
    if (u->row_step != NULL) { /* r has not decayed since the row's last gradient */
        const int32_t steps = u->step - 1 - u->row_step[at];
        const int is_finite = !isinf(old);
        work->active -= old != 0 && is_finite; /* counted before */
        if (steps > 0 && is_finite) old *= exp(steps * u->log_beta2);
        u->row_step[at] = u->step;
    }
    const double squares = NAME(add_lanes)(work->group.squares + group_row * PIECES);
    *r = (WIDE)(u->beta2 * old + (u->row_share == 0 ? 0 : u->row_share * squares));
    return *r == 0 || isinf(*r) ? 0 : (WIDE)(*r * work->per_rho);
}

/* Go to rows, and take their weights from their squares, unless they are given; 0 does not move a row.
 * Rows that move are counted; of a sparse gradient those that begin to. */
static void NAME(lean_go_to)(NAME(Work) *work, int64_t first, int64_t run) {
    const Update *u = work->share->update;
    GROUP *group = &work->group;
    const int is_given = u->row_exp_avg_sq == NULL;
    WIDE weights[ROWS] = {0};
    NAME(go_to)(work, first, run);
    /* Two loops, as a row's roots take long, and then do not keep the next row waiting. */
    for (int r = 0; r < ROWS && first + r * run < work->share->last; r++) {
        const int64_t row = first + r * run;
        weights[r] = is_given ? ((const WIDE *)u->weights)[row] : NAME(lean_row)(work, row, r);
    }
    for (int r = 0; r < ROWS; r++) {
        WIDE weight = weights[r];
        if (weight != 0 && !is_given) {
            const double q = work->limit_share * NAME(add_lanes)(group->squares + LANES_OF_ROWS + r * PIECES);
            weight = NAME(power)(weight, u->exponent);
            /* Compared as squares: few rows need the root. */
            if ((double)weight * weight * q > u->largest_step * u->largest_step)
                weight = (WIDE)(u->largest_step / sqrt(q));
            /* A row of a table counts even if q overflows, and it is left out of the step. */
            work->active += u->row_step != NULL && isinf(q);
        }
        work->active += weight != 0;
        group->rate[r] = NAME(quiet)(weight * u->lr * (u->exp_avg == NULL ? u->factor : 1));
        group->moves[r] = weight != 0;
        if (weight == 0) group->rows[GRAD][r] = work->no_row;
    }
    /* (For memset, gcc takes an instruction that is slow for so few bytes.) */
    for (int i = 0; i < 2 * LANES_OF_ROWS; i++) group->squares[i] = (VECTOR){0};
}

/* Go to the rows whose squares are summed while those before them are updated. */
static void NAME(lean_go_to_next)(NAME(Work) *work, int64_t row, int64_t run) {
    const Update *u = work->share->update;
    for (int r = 0; r < ROWS; r++, row += run) {
        const int is_row = row < work->share->last;
        work->group.rows[NEXT][r] = is_row ? (T *)u->grad + row * u->grad_stride : work->no_row;
        if (u->exp_avg != NULL)
            work->group.rows[NEXT_MOMENT][r] =
                is_row ? (T *)u->exp_avg + row * u->exp_avg_stride : work->no_row;
        /* A row of the table further on, to which no stream leads: so many that they fit into the cache */
        const int64_t ahead = row + 1 + FAR_AHEAD / (u->columns * (int64_t)sizeof(T) + 64);
        if (u->touched == NULL || ahead >= work->share->last) continue;
        const int64_t at = u->touched[ahead];
        const char *line = (const char *)((T *)u->param + at * u->param_stride);
        for (const char *end = line + u->columns * (int64_t)sizeof(T); line < end; line += 64)
            __builtin_prefetch(line, 1, 2);
        __builtin_prefetch((const WIDE *)u->row_exp_avg_sq + at, 1, 2);
        __builtin_prefetch(u->row_step + at, 1, 2);
    }
}

/* Sum the squares of the first rows, before any is updated. */
COLUMNS NAME(lean_first_columns)(GROUP *group, int64_t start, int64_t count) {
    const Update *u = group->update;
    const NAME(Lerp) lerp = NAME(lerp_of)(u, u->factor);
    const WIDE *vectors = group->vectors + VECTORS_OF_LEAN * start;
    for (int64_t i = 0; i < count; i += LINE)
        for (int r = 0; r < ROWS; r++)
            for (int v = 0; v < VECTORS; v++) {
                const VECTOR scale = ((const VECTOR *)(vectors + OF(SCALE)))[v];
                NAME(square_next)(group, &lerp, group->squares, scale, i, r, v, u->exp_avg != NULL);
            }
}

static void NAME(lean_collect)(NAME(Work) *work) {
    const int64_t size = work->share->padded;
    for (int64_t i = 0; i < size; i++) {
        WIDE *of_line = work->group.vectors + OF(0) + i % LINE;
        work->total[i] += (double)of_line[UPDATES * LINE];
        work->total[size + i] += (double)of_line[SQUARES * LINE];
        of_line[UPDATES * LINE] = of_line[SQUARES * LINE] = 0;
    }
}

static void NAME(lean_runs)(NAME(Work) *work, int64_t first, int64_t run) {
    NAME(lean_go_to_next)(work, first, run);
    NAME(over)(NAME(lean_first_columns), &work->group);
    for (int64_t done = 0; done < run; done++) {
        const int is_last = done + 1 == run;
        NAME(lean_go_to)(work, first + done, run);
        NAME(lean_go_to_next)(work, is_last ? work->share->last : first + done + 1, run);
        NAME(over)(work->columns, &work->group);
        if (is_last || done % SUM_ROWS == SUM_ROWS - 1) NAME(lean_collect)(work);
    }
}

static void NAME(lean_pass)(Share *share) {
    const Update *u = share->update;
    NAME(Columns) *const columns[2][2] = {
        {NAME(lean_columns), NAME(lean_stochastically_columns)},
        {NAME(lean_moment_columns), NAME(lean_moment_stochastically_columns)}};
    NAME(Work) work = NAME(begin)(share, ROWS, 1);
    work.columns = columns[u->exp_avg != NULL][u->stochastic];
    /* 1. What is known of each column */
    WIDE *vectors = work.group.vectors = (WIDE *)share->memory;
    const WIDE *nu = u->exp_avg_sq, *mean = u->mean_update;
    int64_t known = 0;
    for (int64_t j = 0; j < u->columns; j++) {
        const int64_t i = NAME(place)(j);
        WIDE *of_line = vectors + OF(0) + i % LINE;
        of_line[SCALE * LINE] = nu[j] == 0 ? 0 : NAME(quiet)(1 / (sqrt(nu[j] * u->scale) + u->eps));
        of_line[MEAN * LINE] = mean == NULL ? 0 : NAME(quiet)(mean[j]);
        known += of_line[SCALE * LINE] != 0;
    }
    const double factor = u->exp_avg == NULL ? u->factor : 1 / u->moment_correction;
    work.limit_share = u->limit_scale * factor * factor / (UNIT * UNIT) / (double)(known ? known : 1);
    work.per_rho = 1 / (u->row_correction * NAME(rho)(u));
    /* 2. The rows */
    NAME(pass)(&work, NAME(lean_runs));
    /* 3. This thread's sums */
    for (int64_t j = 0; j < u->columns; j++) {
        const int64_t i = NAME(place)(j);
        const double squares = work.total[share->padded + i];
        share->sums[j] = work.total[i];
        share->sums[u->columns + j] = u->factor == 0 ? 0 : squares * u->factor * u->factor;
    }
    share->sums[2 * u->columns] = (double)work.active;
}

/* Update nu and the mean update from the sums over all rows. */
static void NAME(finish)(const Update *u) {
    WIDE *nu = u->exp_avg_sq, *mean = u->mean_update;
    const double count = u->sums[2 * u->columns];
    if (count == 0) return;
    for (int64_t j = 0; j < u->columns; j++) {
        nu[j] = (WIDE)(u->beta2 * nu[j] + (1 - u->beta2) * u->sums[u->columns + j] / count);
        if (mean != NULL) mean[j] = (WIDE)(u->sums[j] / count);
    }
}

#undef T
#undef WIDE
#undef SQRT
#undef IS_BFLOAT16
#undef NAME
