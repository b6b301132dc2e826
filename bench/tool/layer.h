/* SPDX-License-Identifier: MIT */
/* The parts of qkv layer. Matrices are row by row, without gaps. */
#ifndef QKV_TOOL_LAYER_H
#define QKV_TOOL_LAYER_H

#include "tool.h"

enum { LAYER_Q, LAYER_K, LAYER_V, LAYER_O, LAYER_MATRICES };

/* A recorded layer, one input, and what PyTorch computed from it. */
struct layer_data {
    int64_t tokens, hidden, heads, head_dim; /* hidden = heads * head_dim */
    struct npy w[LAYER_MATRICES];            /* [hidden in, hidden out] */
    struct npy b[LAYER_MATRICES];            /* [hidden] */
    struct npy x;                            /* [tokens, hidden] */
    struct npy context, out;                 /* [tokens, hidden] */
    struct npy weights;                      /* [heads, tokens, tokens] */
    char **words;                            /* the tokens' texts, printable UTF-8 */
    char *words_memory;
};

/* Reads it from 'folder' ('input' is the files' prefix). 0 or TOOL_ERROR. */
int layer_load(struct layer_data *data, const char *folder, const char *input);
void layer_free(struct layer_data *data);

/* The same layer in f64, and how far an f32 result may be from another. */
struct layer_reference {
    double *context, *out, *weights;
    double *context_tolerance, *out_tolerance, *weights_tolerance;
};

int layer_reference(const struct layer_data *data, struct layer_reference *reference);
void layer_reference_free(struct layer_reference *reference);

/* How qkv layer writes text: with colours, and with more than ASCII. */
struct style {
    bool colour, unicode;
};

struct style style_of_terminal(void);

/* The characters of a text, and spaces after (or before) it up to 'width'. */
int text_width(const char *text);
void print_padded(const char *text, int width, bool right);

/* One row a token, with the three tokens that it attends to most. */
int map_print(const struct layer_data *data, const float *weights, struct style style);

/* For one token: what it attends to most, head by head. */
void map_print_token(const struct layer_data *data, const float *weights, int64_t token,
                     struct style style);

/* An SVG file with one grid a head. 0 or TOOL_ERROR. */
int heatmap_write(const char *path, const struct layer_data *data, const float *weights);

#endif
