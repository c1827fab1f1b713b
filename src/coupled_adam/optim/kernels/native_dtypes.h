/* The passes for the three dtypes; native.c includes this file once for each instruction set.
 *
 * T is the dtype in memory and WIDE the dtype of the arithmetic. */

#define T float
#define WIDE float
#define SQRT sqrtf
#define IS_BFLOAT16 0
#define NAME(x) TARGET(x##_float32)
#include "native_passes.h"

#define T double
#define WIDE double
#define SQRT sqrt
#define IS_BFLOAT16 0
#define NAME(x) TARGET(x##_float64)
#include "native_passes.h"

#define T uint16_t
#define WIDE float
#define SQRT sqrtf
#define IS_BFLOAT16 1
#define NAME(x) TARGET(x##_bfloat16)
#include "native_passes.h"

/* In the order of the enumeration of dtypes. */
#define PASSES_OF(dtype)                                                                  \
    {TARGET(add_##dtype), TARGET(sum_squares_##dtype), TARGET(apply_##dtype),             \
     TARGET(lean_pass_##dtype), TARGET(step_sizes_##dtype), TARGET(finish_##dtype)}
static const Passes TARGET(passes)[] = {PASSES_OF(float32), PASSES_OF(float64), PASSES_OF(bfloat16)};
#undef PASSES_OF

#undef TARGET
#undef VECTOR_BYTES
