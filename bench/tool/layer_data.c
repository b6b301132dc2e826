/* SPDX-License-Identifier: MIT */
/* Reading a recorded layer. */
#include "layer.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* The path "folder/name", which the caller frees. */
static char *join_path(const char *folder, const char *prefix, const char *name)
{
    const size_t size = strlen(folder) + strlen(prefix) + strlen(name) + 2;
    char *path = tool_alloc((int64_t)size, 1);
    if (path)
        snprintf(path, size, "%s/%s%s", folder, prefix, name);
    return path;
}

/* Loads an array and checks its shape; a wanted dimension of -1 may be any. */
static int load_array(const char *folder, const char *prefix, const char *name, struct npy *array,
                      int ndim, const int64_t *wanted)
{
    char *path = join_path(folder, prefix, name);
    int result = path ? tool_load(path, array) : TOOL_ERROR;
    if (result == TOOL_OK) {
        bool right = array->ndim == ndim;
        for (int d = 0; right && d < ndim; d++)
            right = array->shape[d] > 0 && (wanted[d] < 0 || array->shape[d] == wanted[d]);
        char shape[NPY_SHAPE_TEXT], wanted_shape[NPY_SHAPE_TEXT];
        if (!right)
            result = tool_error("%s: the shape is %s, not %s (-1 is any)", path,
                                npy_shape_text(array->ndim, array->shape, shape),
                                npy_shape_text(ndim, wanted, wanted_shape));
    }
    free(path);
    return result;
}

static int load_arrays(struct layer_data *data, const char *folder, const char *input)
{
    static const char *const names[LAYER_MATRICES][2] = {
        {"wq.npy", "bq.npy"}, {"wk.npy", "bk.npy"}, {"wv.npy", "bv.npy"}, {"wo.npy", "bo.npy"}};

    if (load_array(folder, input, "_x.npy", &data->x, 2, (const int64_t[]){-1, -1}))
        return TOOL_ERROR;
    const int64_t tokens = data->tokens = data->x.shape[0];
    const int64_t hidden = data->hidden = data->x.shape[1];
    const int64_t matrix[] = {hidden, hidden}, rows[] = {tokens, hidden};
    const int64_t square[] = {-1, tokens, tokens};

    for (int m = 0; m < LAYER_MATRICES; m++)
        if (load_array(folder, "", names[m][0], &data->w[m], 2, matrix) ||
            load_array(folder, "", names[m][1], &data->b[m], 1, &hidden))
            return TOOL_ERROR;
    if (load_array(folder, input, "_context.npy", &data->context, 2, rows) ||
        load_array(folder, input, "_out.npy", &data->out, 2, rows) ||
        load_array(folder, input, "_weights.npy", &data->weights, 3, square))
        return TOOL_ERROR;

    data->heads = data->weights.shape[0];
    data->head_dim = hidden / data->heads;
    if (data->head_dim * data->heads != hidden)
        return tool_error("%s: %lld heads do not divide the hidden size %lld", folder,
                          (long long)data->heads, (long long)hidden);
    return TOOL_OK;
}

/* How many bytes the UTF-8 character at 'text' has; 0 if it is none. */
static int utf8_length(const unsigned char *text)
{
    if (text[0] < 0x80)
        return text[0] >= ' ' && text[0] != 0x7f ? 1 : 0;
    const int length = text[0] >= 0xf0 && text[0] < 0xf5 ? 4
                       : text[0] >= 0xe0                 ? 3
                       : text[0] >= 0xc2                 ? 2
                                                         : 0;
    if (text[0] >= 0xf5)
        return 0;
    for (int i = 1; i < length; i++)
        if ((text[i] & 0xc0) != 0x80)
            return 0;
    /* Overlong forms, surrogates, beyond U+10FFFF, and the C1 controls. */
    if ((text[0] == 0xe0 && text[1] < 0xa0) || (text[0] == 0xed && text[1] > 0x9f) ||
        (text[0] == 0xf0 && text[1] < 0x90) || (text[0] == 0xf4 && text[1] > 0x8f) ||
        (text[0] == 0xc2 && text[1] < 0xa0) ||
        (text[0] == 0xef && text[1] == 0xbf && text[2] > 0xbd))
        return 0;
    return length;
}

/* Neither a terminal nor an XML file may meet control characters. */
static void make_printable(char *text)
{
    for (unsigned char *c = (unsigned char *)text; *c;) {
        const int length = utf8_length(c);
        if (length == 0)
            *c = '?';
        c += length ? length : 1;
    }
}

/* The whole file with a final NUL, or NULL after a message. */
static char *read_text(const char *path)
{
    enum { MOST = 1 << 20 };
    FILE *file = fopen(path, "rb");
    if (!file) {
        (void)tool_error("%s: cannot be opened: %s", path, strerror(errno));
        return NULL;
    }
    char *text = tool_alloc(MOST + 1, 1);
    if (text) {
        const size_t size = fread(text, 1, MOST + 1, file);
        if (size > MOST || ferror(file)) {
            (void)tool_error("%s: cannot be read, or is longer than 1 MiB", path);
            free(text);
            text = NULL;
        } else {
            text[size] = '\0';
        }
    }
    (void)fclose(file);
    return text;
}

static int load_words(struct layer_data *data, const char *path)
{
    data->words = tool_alloc(data->tokens, sizeof *data->words);
    data->words_memory = data->words ? read_text(path) : NULL;
    if (!data->words_memory)
        return TOOL_ERROR;

    int64_t count = 0;
    for (char *line = data->words_memory; *line;) {
        char *end = line + strcspn(line, "\n");
        char *next = *end ? end + 1 : end;
        *end = '\0';
        make_printable(line);
        if (count < data->tokens)
            data->words[count] = line;
        count++;
        line = next;
    }
    if (count != data->tokens)
        return tool_error("%s: %lld lines, but the input has %lld tokens", path, (long long)count,
                          (long long)data->tokens);
    return TOOL_OK;
}

int layer_load(struct layer_data *data, const char *folder, const char *input)
{
    *data = (struct layer_data){0};
    if (load_arrays(data, folder, input))
        return TOOL_ERROR;
    char *path = join_path(folder, input, "_tokens.txt");
    const int result = path ? load_words(data, path) : TOOL_ERROR;
    free(path);
    return result;
}

void layer_free(struct layer_data *data)
{
    for (int m = 0; m < LAYER_MATRICES; m++) {
        npy_free(&data->w[m]);
        npy_free(&data->b[m]);
    }
    npy_free(&data->x);
    npy_free(&data->context);
    npy_free(&data->out);
    npy_free(&data->weights);
    free(data->words);
    free(data->words_memory);
    *data = (struct layer_data){0};
}
