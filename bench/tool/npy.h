/* SPDX-License-Identifier: MIT */
/*
 * Arrays in NumPy's .npy files, as far as the tool and the tests need them:
 * format versions 1.0, 2.0 and 3.0, little-endian '<f4' and '<f2' (widened to
 * f32, which is exact), C order, up to four dimensions.
 *
 * A file is not trusted. Every number in its header is checked against the
 * file's real size before anything is allocated, so that memory never grows
 * beyond twice the size of the file.
 */
#ifndef QKV_TOOL_NPY_H
#define QKV_TOOL_NPY_H

#include <stddef.h>
#include <stdint.h>

enum {
    NPY_MAX_DIMS = 4,
    NPY_MAX_HEADER = 65536 /* bytes; a longer header is refused */
};

struct npy {
    float *data;   /* 'count' elements, C order; never NULL after success */
    int64_t count; /* the product of the dimensions; 1 without dimensions */
    int ndim;      /* 0 to NPY_MAX_DIMS */
    int64_t shape[NPY_MAX_DIMS];
    int element_size; /* in the file: 4 for '<f4', 2 for '<f2' */
};

/*
 * npy_load() reads the file at 'path', npy_parse() one that is in memory.
 * Both return 0, or -1 with one line (without the path or a line feed) in
 * 'error', which holds 'error_size' > 0 bytes; then 'out' is all zeros. After
 * success the caller releases the array with npy_free().
 */
int npy_load(const char *path, struct npy *out, char *error, size_t error_size);
int npy_parse(const void *bytes, size_t size, struct npy *out, char *error, size_t error_size);

/* npy_free() also accepts what a failed load left, and may be called twice. */
void npy_free(struct npy *array);

/*
 * npy_save() writes an '<f4' file. Whatever goes wrong, 'path' then holds
 * either what it held before or the complete new file. Returns as npy_load().
 */
int npy_save(const char *path, const float *data, int ndim, const int64_t *shape, char *error,
             size_t error_size);

/*
 * npy_shape_text() writes a shape as "[12, 15, 15]" into 'text' and returns
 * 'text'. NPY_SHAPE_TEXT bytes are always enough.
 */
enum { NPY_SHAPE_TEXT = NPY_MAX_DIMS * 22 + 3 };
char *npy_shape_text(int ndim, const int64_t *shape, char text[NPY_SHAPE_TEXT]);

#endif
