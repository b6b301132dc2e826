/* SPDX-License-Identifier: MIT */
/*
 * A .npy file is the bytes "\x93NUMPY", a version (major, minor), the length
 * of the header (2 bytes in version 1, 4 bytes later), the header, which is a
 * Python dictionary as text, and the elements:
 *
 *     {'descr': '<f4', 'fortran_order': False, 'shape': (12, 15, 15), }
 *
 * The parser is a cursor that only moves forward and never past its end.
 */
#include "npy.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "outfile.h"

enum {
    MAGIC_SIZE = 6,
    PREFIX_MAX = 12 + NPY_MAX_HEADER, /* all that comes before the elements */
    CHUNK = 1 << 16                   /* bytes read at a time, a multiple of 4 */
};

static const unsigned char magic[MAGIC_SIZE] = {0x93, 'N', 'U', 'M', 'P', 'Y'};

/* Where an error message goes. */
struct report {
    char *text;
    size_t size;
};

__attribute__((format(printf, 2, 3))) static int fail(struct report report, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    (void)vsnprintf(report.text, report.size, format, arguments);
    va_end(arguments);
    return -1;
}

/* ------------------------------------------------------ the header's text */

struct cursor {
    const char *at, *end;
};

static void skip_blanks(struct cursor *c)
{
    while (c->at < c->end && (*c->at == ' ' || *c->at == '\t' || *c->at == '\n' || *c->at == '\r'))
        c->at++;
}

/* Takes 'wanted' if it comes next, after blanks. */
static bool take(struct cursor *c, char wanted)
{
    skip_blanks(c);
    if (c->at == c->end || *c->at != wanted)
        return false;
    c->at++;
    return true;
}

static bool take_word(struct cursor *c, const char *word)
{
    const size_t length = strlen(word);
    skip_blanks(c);
    if ((size_t)(c->end - c->at) < length || memcmp(c->at, word, length) != 0)
        return false;
    c->at += length;
    return true;
}

/* Takes a quoted string without escapes that fits 'text', or nothing. */
static bool take_string(struct cursor *c, char *text, size_t text_size)
{
    skip_blanks(c);
    if (c->at == c->end || (*c->at != '\'' && *c->at != '"'))
        return false;
    const char *start = c->at + 1;
    const char *stop = memchr(start, *c->at, (size_t)(c->end - start));
    if (!stop || (size_t)(stop - start) >= text_size)
        return false;
    for (const char *s = start; s < stop; s++)
        if (*s < ' ' || *s > '~' || *s == '\\')
            return false;
    memcpy(text, start, (size_t)(stop - start));
    text[stop - start] = '\0';
    c->at = stop + 1;
    return true;
}

static int take_dimension(struct cursor *c, int64_t *dimension, struct report report)
{
    skip_blanks(c);
    if (c->at < c->end && *c->at == '-')
        return fail(report, "a dimension of the shape is negative");
    if (c->at == c->end || *c->at < '0' || *c->at > '9')
        return fail(report, "the header's shape is not a tuple of numbers");
    int64_t value = 0;
    for (; c->at < c->end && *c->at >= '0' && *c->at <= '9'; c->at++) {
        const int digit = *c->at - '0';
        if (value > (INT64_MAX - digit) / 10)
            return fail(report, "a dimension of the shape is too large");
        value = value * 10 + digit;
    }
    *dimension = value;
    return 0;
}

/* "()", "(3,)", "(3, 4)" or "(3, 4, )", as Python writes or reads tuples. */
static int take_shape(struct cursor *c, struct npy *out, struct report report)
{
    if (!take(c, '('))
        return fail(report, "the header's shape is not a tuple of numbers");
    bool comma = true;
    while (!take(c, ')')) {
        if (!comma)
            return fail(report, "the header's shape is not a tuple of numbers");
        if (out->ndim == NPY_MAX_DIMS)
            return fail(report, "more than %d dimensions", NPY_MAX_DIMS);
        if (take_dimension(c, &out->shape[out->ndim], report))
            return -1;
        out->ndim++;
        comma = take(c, ',');
    }
    if (out->ndim == 1 && !comma)
        return fail(report, "the header's shape is not a tuple of numbers");
    return 0;
}

static int take_descr(struct cursor *c, struct npy *out, struct report report)
{
    char descr[16];
    if (!take_string(c, descr, sizeof descr))
        return fail(report, "the element type is not supported (only '<f4' and '<f2' are)");
    if (strcmp(descr, "<f4") == 0)
        out->element_size = 4;
    else if (strcmp(descr, "<f2") == 0)
        out->element_size = 2;
    else
        return fail(report, "element type '%s' is not supported (only '<f4' and '<f2' are)", descr);
    return 0;
}

static int take_order(struct cursor *c, struct report report)
{
    if (take_word(c, "False"))
        return 0;
    if (take_word(c, "True"))
        return fail(report, "Fortran order is not supported (save the array in C order)");
    return fail(report, "the header's fortran_order is neither True nor False");
}

/* Each of the three keys has to come once; their order is free. */
static int parse_dictionary(struct cursor *c, struct npy *out, struct report report)
{
    enum { DESCR = 1, ORDER = 2, SHAPE = 4, ALL = 7 };
    int seen = 0;
    bool comma = true;

    if (!take(c, '{'))
        return fail(report, "the header is not a dictionary");
    while (!take(c, '}')) {
        char key[16];
        if (!comma || !take_string(c, key, sizeof key) || !take(c, ':'))
            return fail(report, "the header is not a dictionary with the keys of a .npy file");
        const int which = strcmp(key, "descr") == 0           ? DESCR
                          : strcmp(key, "fortran_order") == 0 ? ORDER
                          : strcmp(key, "shape") == 0         ? SHAPE
                                                              : 0;
        if (!which)
            return fail(report, "the header has an unknown key '%s'", key);
        if (seen & which)
            return fail(report, "the header has the key '%s' twice", key);
        seen |= which;
        const int status = which == DESCR   ? take_descr(c, out, report)
                           : which == ORDER ? take_order(c, report)
                                            : take_shape(c, out, report);
        if (status)
            return status;
        comma = take(c, ',');
    }
    skip_blanks(c);
    if (c->at != c->end)
        return fail(report, "the header has something after its dictionary");
    if (seen != ALL)
        return fail(report, "the header lacks descr, fortran_order or shape");
    return 0;
}

/* ---------------------------------------------------------- the whole file */

/*
 * Sets 'count'. A dimension of 0 makes the array empty, but the others still
 * have to multiply to something that code can index.
 */
static int count_elements(struct npy *out, struct report report)
{
    int64_t product = 1;
    bool empty = false;
    for (int d = 0; d < out->ndim; d++) {
        const int64_t dimension = out->shape[d];
        if (dimension == 0)
            empty = true;
        else if (product > INT64_MAX / (int64_t)sizeof(float) / dimension)
            return fail(report, "the shape has more elements than can be addressed");
        else
            product *= dimension;
    }
    out->count = empty ? 0 : product;
    return 0;
}

/*
 * Everything before the elements, of a file of 'file_size' bytes of which the
 * first 'available' (the smaller of the two and PREFIX_MAX) are at 'bytes'.
 * Stores where the elements begin.
 */
static int parse_prefix(const unsigned char *bytes, size_t available, uint64_t file_size,
                        struct npy *out, size_t *data_offset, struct report report)
{
    if (available < MAGIC_SIZE || memcmp(bytes, magic, MAGIC_SIZE) != 0)
        return fail(report, "not a .npy file");
    if (available < 10)
        return fail(report, "truncated: the file ends in its header");
    const int major = bytes[6];
    if (major < 1 || major > 3 || bytes[7] != 0)
        return fail(report, "format version %d.%d is not supported", major, bytes[7]);

    uint32_t header_size = (uint32_t)bytes[8] | (uint32_t)bytes[9] << 8;
    size_t header_at = 10;
    if (major > 1) {
        header_at = 12;
        if (available < header_at)
            return fail(report, "truncated: the file ends in its header");
        header_size |= (uint32_t)bytes[10] << 16 | (uint32_t)bytes[11] << 24;
    }
    if (header_size > NPY_MAX_HEADER)
        return fail(report, "a header of %" PRIu32 " bytes is refused (at most %d)", header_size,
                    NPY_MAX_HEADER);
    if (header_size > available - header_at)
        return fail(report, "truncated: the file ends in its header");

    struct cursor cursor = {(const char *)bytes + header_at, NULL};
    cursor.end = cursor.at + header_size;
    *data_offset = header_at + header_size;
    if (parse_dictionary(&cursor, out, report) || count_elements(out, report))
        return -1;

    const uint64_t wanted = (uint64_t)out->count * (uint64_t)out->element_size;
    const uint64_t present = file_size - *data_offset;
    if (wanted != present) {
        char shape[NPY_SHAPE_TEXT];
        return fail(report,
                    "%s: the shape %s needs %" PRIu64 " bytes of data, the file has %" PRIu64,
                    present < wanted ? "truncated" : "too long",
                    npy_shape_text(out->ndim, out->shape, shape), wanted, present);
    }
    return 0;
}

/* Exact: every binary16 number is a binary32 number. A NaN keeps its payload. */
static float widen_half(uint32_t half)
{
    const uint32_t sign = (half & 0x8000u) << 16;
    const uint32_t exponent = half >> 10 & 31u;
    const uint32_t mantissa = half & 0x3ffu;
    float value;

    if (exponent == 0) {
        /* Zero or subnormal: mantissa * 2^-24, exact in f32. */
        value = (float)mantissa * 0x1p-24f;
        return sign ? -value : value;
    }
    const uint32_t bits = exponent == 31 ? sign | 0x7f800000u | mantissa << 13
                                         : sign | (exponent + 112u) << 23 | mantissa << 13;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Bytes are put together one by one, so that the host's byte order is no matter. */
static void convert(const unsigned char *bytes, int element_size, float *out, size_t count)
{
    if (element_size == 2) {
        for (size_t i = 0; i < count; i++)
            out[i] = widen_half((uint32_t)bytes[2 * i] | (uint32_t)bytes[2 * i + 1] << 8);
        return;
    }
    for (size_t i = 0; i < count; i++) {
        const unsigned char *b = bytes + 4 * i;
        const uint32_t bits =
            (uint32_t)b[0] | (uint32_t)b[1] << 8 | (uint32_t)b[2] << 16 | (uint32_t)b[3] << 24;
        memcpy(out + i, &bits, sizeof bits);
    }
}

static int allocate(struct npy *out, struct report report)
{
    if ((uint64_t)out->count > SIZE_MAX / sizeof(float))
        return fail(report, "the shape has more elements than can be addressed");
    /* One element at least: malloc(0) may return NULL. */
    out->data = malloc(sizeof(float) * (out->count ? (size_t)out->count : 1));
    return out->data ? 0 : fail(report, "out of memory");
}

int npy_parse(const void *bytes, size_t size, struct npy *out, char *error, size_t error_size)
{
    const struct report report = {error, error_size};
    const size_t available = size < PREFIX_MAX ? size : PREFIX_MAX;
    size_t offset;

    *out = (struct npy){0};
    if (parse_prefix(bytes, available, size, out, &offset, report) || allocate(out, report)) {
        *out = (struct npy){0};
        return -1;
    }
    convert((const unsigned char *)bytes + offset, out->element_size, out->data,
            (size_t)out->count);
    return 0;
}

/* Reads exactly 'size' bytes at 'offset'. */
static int read_at(int file, unsigned char *bytes, size_t size, off_t offset, struct report report)
{
    while (size > 0) {
        const ssize_t got = pread(file, bytes, size, offset);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            return fail(report, "cannot be read: %s", strerror(errno));
        if (got == 0)
            return fail(report, "became shorter while it was read");
        bytes += got;
        size -= (size_t)got;
        offset += got;
    }
    return 0;
}

static int read_elements(int file, unsigned char *buffer, size_t offset, struct npy *out,
                         struct report report)
{
    const size_t size = (size_t)out->element_size;
    const size_t count = (size_t)out->count;
    for (size_t done = 0, step; done < count; done += step) {
        step = count - done < CHUNK / size ? count - done : CHUNK / size;
        if (read_at(file, buffer, step * size, (off_t)(offset + done * size), report))
            return -1;
        convert(buffer, out->element_size, out->data + done, step);
    }
    return 0;
}

static int load(int file, struct npy *out, struct report report)
{
    struct stat status;
    if (fstat(file, &status))
        return fail(report, "cannot be read: %s", strerror(errno));
    if (!S_ISREG(status.st_mode))
        return fail(report, "not a regular file");

    const uint64_t file_size = (uint64_t)status.st_size;
    const size_t available = file_size < PREFIX_MAX ? (size_t)file_size : PREFIX_MAX;
    unsigned char *buffer = malloc(PREFIX_MAX); /* later holds chunks of elements */
    if (!buffer)
        return fail(report, "out of memory");
    size_t offset;
    const int result = read_at(file, buffer, available, 0, report) ||
                               parse_prefix(buffer, available, file_size, out, &offset, report) ||
                               allocate(out, report) ||
                               read_elements(file, buffer, offset, out, report)
                           ? -1
                           : 0;
    free(buffer);
    return result;
}

int npy_load(const char *path, struct npy *out, char *error, size_t error_size)
{
    const struct report report = {error, error_size};
    *out = (struct npy){0};
    /* O_NONBLOCK: opening a pipe that nobody writes to must not wait. */
    const int file = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (file < 0)
        return fail(report, "cannot be opened: %s", strerror(errno));
    const int result = load(file, out, report);
    (void)close(file);
    if (result) {
        free(out->data);
        *out = (struct npy){0};
    }
    return result;
}

void npy_free(struct npy *array)
{
    free(array->data);
    *array = (struct npy){0};
}

/* ----------------------------------------------------------------- writing */

/* Header and padding: NumPy aligns the elements to 64 bytes. */
static size_t write_prefix(unsigned char prefix[256], int ndim, const int64_t *shape)
{
    char *text = (char *)prefix + 10;
    size_t length = (size_t)sprintf(text, "{'descr': '<f4', 'fortran_order': False, 'shape': (");
    for (int d = 0; d < ndim; d++)
        length += (size_t)sprintf(text + length, "%" PRId64 "%s", shape[d],
                                  d + 1 < ndim ? ", "
                                  : ndim == 1  ? ","
                                               : "");
    length += (size_t)sprintf(text + length, "), }");
    while ((10 + length + 1) % 64 != 0)
        text[length++] = ' ';
    text[length++] = '\n';

    memcpy(prefix, magic, MAGIC_SIZE);
    prefix[6] = 1;
    prefix[7] = 0;
    prefix[8] = (unsigned char)(length & 0xff);
    prefix[9] = (unsigned char)(length >> 8);
    return 10 + length;
}

static int write_elements(FILE *stream, const float *data, int64_t count)
{
    unsigned char buffer[4096];
    for (int64_t done = 0, step; done < count; done += step) {
        const int64_t room = (int64_t)sizeof buffer / 4;
        step = count - done < room ? count - done : room;
        for (int64_t i = 0; i < step; i++) {
            uint32_t bits;
            memcpy(&bits, data + done + i, sizeof bits);
            for (int byte = 0; byte < 4; byte++)
                buffer[4 * i + byte] = (unsigned char)(bits >> 8 * byte & 0xff);
        }
        if (fwrite(buffer, 4, (size_t)step, stream) != (size_t)step)
            return -1;
    }
    return 0;
}

int npy_save(const char *path, const float *data, int ndim, const int64_t *shape, char *error,
             size_t error_size)
{
    const struct report report = {error, error_size};
    if (ndim < 0 || ndim > NPY_MAX_DIMS)
        return fail(report, "cannot be written with %d dimensions", ndim);
    int64_t count = 1;
    for (int d = 0; d < ndim; d++)
        count *= shape[d];

    unsigned char prefix[256];
    const size_t prefix_size = write_prefix(prefix, ndim, shape);
    struct outfile file;
    if (outfile_open(&file, path) || fwrite(prefix, 1, prefix_size, file.stream) != prefix_size ||
        write_elements(file.stream, data, count) || outfile_commit(&file)) {
        const int reason = errno;
        outfile_abandon(&file);
        return fail(report, "cannot be written: %s", strerror(reason));
    }
    return 0;
}

char *npy_shape_text(int ndim, const int64_t *shape, char text[NPY_SHAPE_TEXT])
{
    size_t length = (size_t)sprintf(text, "[");
    for (int d = 0; d < ndim; d++)
        length += (size_t)sprintf(text + length, "%s%" PRId64, d ? ", " : "", shape[d]);
    (void)sprintf(text + length, "]");
    return text;
}
