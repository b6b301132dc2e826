/* SPDX-License-Identifier: MIT */
#ifndef QKV_DRIVERS_PROJECT_H
#define QKV_DRIVERS_PROJECT_H

#include "internal.h"
#include "validate.h"

/* A validated projection: out[b][h][i] = input[b][0][i] W[:, head h] + bias. */
typedef struct qkv_projection {
    qkv_view input, out; /* each f32, f16 or bf16, as the weights are */
    const void *weight;
    const float *bias; /* or NULL */
    int64_t weight_stride;
    int32_t weight_dtype;
    bool weight_out_in; /* the weight matrix is stored [out][in] */
} qkv_projection;

/* Floats of scratch memory; constant, but for the type of the output. */
int64_t qkv_projection_scratch(int32_t out_dtype);

void qkv_run_projection(const qkv_projection *projection, const qkv_kernels *kernels,
                        float *scratch);

#endif
