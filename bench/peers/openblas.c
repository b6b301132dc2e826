/* SPDX-License-Identifier: MIT */
/*
 * Attention composed from a BLAS: per head S = scale Q K^T, a softmax of
 * the rows, O = S V. Under a causal mask in blocks of queries that skip the
 * keys nobody in the block sees. The rows of a group of query heads that
 * share a key head are one matrix. Built by run.py as a shared object, with
 * fast arithmetic so that the compiler vectorises the exponentials.
 */
#include <cblas.h>
#include <math.h>
#include <stdint.h>

enum { BLOCK = 64 };

static void softmax(float *row, int64_t n)
{
    float max = row[0], sum = 0.0f;
    for (int64_t j = 1; j < n; j++)
        max = row[j] > max ? row[j] : max;
    for (int64_t j = 0; j < n; j++) {
        row[j] = expf(row[j] - max);
        sum += row[j];
    }
    for (int64_t j = 0; j < n; j++)
        row[j] /= sum;
}

static void block(const float *q, const float *k, const float *v, float *out, float *scores,
                  int64_t rows, int64_t keys, int64_t dim, int64_t first_hidden)
{
    const int m = (int)rows, n = (int)keys, d = (int)dim;
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasTrans, m, n, d, 1.0f / sqrtf((float)dim), q, d, k,
                d, 0.0f, scores, n);
    for (int64_t i = 0; i < rows; i++) {
        const int64_t seen = first_hidden + i < keys ? first_hidden + i : keys;
        softmax(scores + i * keys, seen);
        for (int64_t j = seen; j < keys; j++)
            scores[i * keys + j] = 0.0f;
    }
    cblas_sgemm(CblasRowMajor, CblasNoTrans, CblasNoTrans, m, d, n, 1.0f, scores, n, v, d, 0.0f,
                out, d);
}

/* 'scores' has room for group * q_len * kv_len. */
void attention(const float *q, const float *k, const float *v, float *out, float *scores,
               int64_t heads, int64_t kv_heads, int64_t q_len, int64_t kv_len, int64_t dim,
               int causal)
{
    const int64_t group = heads / kv_heads;
    for (int64_t g = 0; !causal && g < kv_heads; g++)
        block(q + g * group * q_len * dim, k + g * kv_len * dim, v + g * kv_len * dim,
              out + g * group * q_len * dim, scores, group * q_len, kv_len, dim, kv_len);
    for (int64_t h = 0; causal && h < heads; h++)
        for (int64_t i = 0; i < q_len; i += BLOCK) {
            const int64_t rows = q_len - i < BLOCK ? q_len - i : BLOCK;
            const int64_t offset = (h * q_len + i) * dim, kv = h / group * kv_len * dim;
            const int64_t hidden = i + 1 + kv_len - q_len;
            block(q + offset, k + kv, v + kv, out + offset, scores, rows, hidden + rows - 1, dim,
                  hidden);
        }
}
