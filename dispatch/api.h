/* SPDX-License-Identifier: MIT */
/* What the files of public functions share with each other. */
#ifndef QKV_API_H
#define QKV_API_H

#include "../kernels/drivers/attention.h"
#include "../kernels/drivers/project.h"

/* Everything that is checked before qkv_attention() writes, but scratch. */
qkv_status qkv_check_attention(const qkv_attention_desc *desc, qkv_attention_problem *problem);

/* The factor of the logits, and the same in units of log2(e). */
qkv_status qkv_check_scale(int32_t flags, float scale, int64_t head_dim, float *natural,
                           float *scale_log2);

/* Does scratch memory of all workers satisfy the rules, away from all tensors? */
qkv_status qkv_check_workers_scratch(const qkv_attention_desc *desc, const void *scratch,
                                     size_t scratch_size, size_t need);

#endif
