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
static const Passes TARGET(passes)[] = {
    {TARGET(measure_float32), TARGET(center_float32), TARGET(apply_float32),
     TARGET(step_sizes_float32)},
    {TARGET(measure_float64), TARGET(center_float64), TARGET(apply_float64),
     TARGET(step_sizes_float64)},
    {TARGET(measure_bfloat16), TARGET(center_bfloat16), TARGET(apply_bfloat16),
     TARGET(step_sizes_bfloat16)},
};

#undef TARGET
#undef VECTOR_BYTES
