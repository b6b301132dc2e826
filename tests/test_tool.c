/* SPDX-License-Identifier: MIT */
/*
 * The reader and writer of .npy files against files that a careless or
 * hostile program might write, and the tool's exit codes and output.
 *
 * QKV_TOOL is the path of the tool and QKV_DATA that of tests/data.
 */
#include <criterion/criterion.h>

#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "npy.h"

/* --------------------------------------------------------- files in memory */

struct bytes {
    size_t size;
    unsigned char data[2048];
};

static void append(struct bytes *b, const void *data, size_t size)
{
    cr_assert_leq(b->size + size, sizeof b->data);
    memcpy(b->data + b->size, data, size);
    b->size += size;
}

/* A file of the given version with 'header' and 'data_size' bytes 0, 1, 2 ... */
static struct bytes make_file(int major, const char *header, size_t data_size)
{
    struct bytes b = {0};
    const size_t length = strlen(header);
    const unsigned char prefix[12] = {0x93,
                                      'N',
                                      'U',
                                      'M',
                                      'P',
                                      'Y',
                                      (unsigned char)major,
                                      0,
                                      (unsigned char)(length & 255),
                                      (unsigned char)(length >> 8),
                                      0,
                                      0};
    append(&b, prefix, major == 1 ? 10 : 12);
    append(&b, header, length);
    for (size_t i = 0; i < data_size; i++)
        append(&b, &(unsigned char){(unsigned char)i}, 1);
    return b;
}

/*
 * Parses from memory of exactly the file's size, so that a sanitizer sees a
 * read past the end. Checks what holds for every outcome.
 */
static int parse(const unsigned char *data, size_t size, struct npy *array, char error[256])
{
    unsigned char *copy = malloc(size ? size : 1);
    cr_assert_not_null(copy);
    memcpy(copy, data, size);
    memset(error, 0, 256);
    const int result = npy_parse(copy, size, array, error, 256);
    free(copy);

    if (result == 0) {
        cr_assert_not_null(array->data);
        cr_assert_leq((uint64_t)array->count * (uint64_t)array->element_size, size);
    } else {
        cr_assert_eq(result, -1);
        cr_assert_null(array->data);
        cr_assert_eq(array->count, 0);
        cr_assert(strlen(error) > 0 && !strchr(error, '\n'), "message: '%s'", error);
    }
    return result;
}

#define HEADER(descr, order, shape)                                                                \
    "{'descr': '" descr "', 'fortran_order': " order ", 'shape': " shape ", }\n"

/* ------------------------------------------------------------ good files */

Test(npy, versions_1_to_3)
{
    for (int major = 1; major <= 3; major++) {
        const struct bytes file = make_file(major, HEADER("<f4", "False", "(2, 3)"), 24);
        struct npy array;
        char error[256];
        cr_assert_eq(parse(file.data, file.size, &array, error), 0, "%s", error);
        cr_expect(array.ndim == 2 && array.shape[0] == 2 && array.shape[1] == 3);
        cr_expect_eq(array.count, 6);
        cr_expect_eq(array.element_size, 4);
        for (int i = 0; i < 6; i++) {
            uint32_t bits;
            memcpy(&bits, array.data + i, 4);
            const uint32_t first = 4u * (uint32_t)i;
            cr_expect_eq(bits, first | (first + 1) << 8 | (first + 2) << 16 | (first + 3) << 24);
        }
        npy_free(&array);
        npy_free(&array); /* harmless */
    }
}

Test(npy, headers_that_differ_in_form)
{
    static const struct {
        const char *header;
        size_t data_size;
        int ndim;
        int64_t count;
    } cases[] = {
        {HEADER("<f4", "False", "()"), 4, 0, 1},
        {HEADER("<f4", "False", "(1,)"), 4, 1, 1},
        {HEADER("<f4", "False", "(0,)"), 0, 1, 0},
        {HEADER("<f4", "False", "(3, 0, 2)"), 0, 3, 0},
        {HEADER("<f4", "False", "(1, 2, 1, 2)"), 16, 4, 4},
        {HEADER("<f2", "False", "(1, 2, 1, 2)"), 8, 4, 4},
        {"{\"shape\":(2,1,),\"fortran_order\":False,\"descr\":\"<f4\"}", 8, 2, 2},
        {"  {'descr' : '<f4' , 'shape' : ( 2 , 1 ) , 'fortran_order' : False }   \n", 8, 2, 2},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct bytes file = make_file(1, cases[i].header, cases[i].data_size);
        struct npy array;
        char error[256];
        cr_expect_eq(parse(file.data, file.size, &array, error), 0, "case %zu: %s", i, error);
        cr_expect_eq(array.ndim, cases[i].ndim, "case %zu", i);
        cr_expect_eq(array.count, cases[i].count, "case %zu", i);
        npy_free(&array);
    }
}

/* Every binary16 number, against its definition. */
Test(npy, f16_is_widened_exactly)
{
    const char *header = HEADER("<f2", "False", "(65536,)");
    const size_t size = 10 + strlen(header) + 2 * 65536;
    unsigned char *file = malloc(size);
    cr_assert_not_null(file);
    const struct bytes prefix = make_file(1, header, 0);
    memcpy(file, prefix.data, prefix.size);
    for (size_t h = 0; h < 65536; h++) {
        file[prefix.size + 2 * h] = (unsigned char)(h & 255);
        file[prefix.size + 2 * h + 1] = (unsigned char)(h >> 8);
    }
    struct npy array;
    char error[256];
    cr_assert_eq(parse(file, size, &array, error), 0, "%s", error);
    free(file);

    for (int h = 0; h < 65536; h++) {
        const int exponent = h >> 10 & 31, mantissa = h & 1023;
        const float value = array.data[h];
        cr_assert_eq(signbit(value) != 0, h >> 15, "0x%04x", (unsigned)h);
        if (exponent == 31 && mantissa) {
            cr_assert(isnan(value), "0x%04x", (unsigned)h);
            continue;
        }
        const double expected = exponent == 31  ? (double)INFINITY
                                : exponent == 0 ? ldexp(mantissa, -24)
                                                : ldexp(1024 + mantissa, exponent - 25);
        cr_assert_eq(fabs((double)value), expected, "0x%04x", (unsigned)h);
    }
    npy_free(&array);
}

/* ------------------------------------------------------------- bad files */

Test(npy, bad_headers_are_refused)
{
    static const struct {
        const char *header;
        size_t data_size;
        const char *message; /* has to be part of the error */
    } cases[] = {
        {HEADER("<f8", "False", "(2, 3)"), 48, "'<f8'"},
        {HEADER(">f4", "False", "(2, 3)"), 24, "'>f4'"},
        {HEADER("<i4", "False", "(2, 3)"), 24, "'<i4'"},
        {HEADER("|O", "False", "(2, 3)"), 24, "'|O'"},
        {"{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (2,)}", 8, "type"},
        {"{'descr': '<f4\\x00', 'fortran_order': False, 'shape': (2,)}", 8, "type"},
        {HEADER("<f4", "True", "(2, 3)"), 24, "Fortran"},
        {HEADER("<f4", "1", "(2, 3)"), 24, "fortran_order"},
        {HEADER("<f4", "False", "(-2, 3)"), 24, "negative"},
        {HEADER("<f4", "False", "(2, -3)"), 24, "negative"},
        {HEADER("<f4", "False", "(2, 3"), 24, "tuple"},
        {HEADER("<f4", "False", "(2 3)"), 24, "tuple"},
        {HEADER("<f4", "False", "(,)"), 4, "tuple"},
        {HEADER("<f4", "False", "(3)"), 12, "tuple"},
        {HEADER("<f4", "False", "[2, 3]"), 24, "tuple"},
        {HEADER("<f4", "False", "(2.0, 3)"), 24, "tuple"},
        {HEADER("<f4", "False", "((((((2, 3))))))"), 24, "tuple"},
        {HEADER("<f4", "False", "(1, 1, 1, 2, 3)"), 24, "dimensions"},
        {HEADER("<f4", "False", "(9223372036854775807,)"), 24, "more elements"},
        {HEADER("<f4", "False", "(9223372036854775808,)"), 24, "too large"},
        {HEADER("<f4", "False", "(18446744073709551622,)"), 24, "too large"},
        {HEADER("<f4", "False", "(4294967296, 4294967296)"), 0, "more elements"},
        {HEADER("<f4", "False", "(2147483648, 2147483648, 2, 1)"), 0, "more elements"},
        {HEADER("<f4", "False", "(0, 4294967296, 4294967296)"), 0, "more elements"},
        {HEADER("<f4", "False", "(1099511627776,)"), 24, "truncated"},
        {HEADER("<f4", "False", "(2, 3)"), 23, "truncated"},
        {HEADER("<f4", "False", "(2, 3)"), 0, "truncated"},
        {HEADER("<f4", "False", "(2, 3)"), 25, "too long"},
        {HEADER("<f4", "False", "(0,)"), 1, "too long"},
        {HEADER("<f2", "False", "(2, 3)"), 24, "too long"},
        {"{'descr': '<f4', 'fortran_order': False}", 4, "lacks"},
        {"{'fortran_order': False, 'shape': (1,)}", 4, "lacks"},
        {"{}", 4, "lacks"},
        {"{'descr': '<f4', 'descr': '<f4', 'fortran_order': False, 'shape': (1,)}", 4, "twice"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (1,), 'x': 1}", 4, "unknown key"},
        {"{'descr': '<f4' 'fortran_order': False, 'shape': (1,)}", 4, "dictionary"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (1,)} {}", 4, "after"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (1,)", 4, "dictionary"},
        {"{'descr': '<f4', 'fortran_order': False, 'shape': (1", 4, "tuple"},
        {"{'descr': '<f4", 4, "type"},
        {"{'des", 4, "dictionary"},
        {"(1, 2)", 4, "dictionary"},
        {"{'descr': '<f4_____________', 'fortran_order': False, 'shape': (1,)}", 4,
         "the element type"},
        {"{'0123456789abcdef': 1}", 4, "with the keys"},
        {"{'0123456789abcde': 1}", 4, "unknown key"},
        {"", 4, "dictionary"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct bytes file = make_file(1, cases[i].header, cases[i].data_size);
        struct npy array;
        char error[256];
        cr_expect_eq(parse(file.data, file.size, &array, error), -1, "accepted: %s",
                     cases[i].header);
        cr_expect_not_null(strstr(error, cases[i].message), "%s: '%s' lacks '%s'", cases[i].header,
                           error, cases[i].message);
    }
}

Test(npy, bad_prefixes_are_refused)
{
    static const struct {
        size_t at;
        unsigned char value;
        const char *message;
    } cases[] = {
        {0, 'X', "not a .npy"},
        {5, 'Z', "not a .npy"},
        {6, 0, "version"},
        {6, 4, "version"},
        {7, 1, "version"},
        {8, 1, "dictionary"},
        {9, 255, "ends in its header"},
    };
    const struct bytes good = make_file(1, HEADER("<f4", "False", "(2, 3)"), 24);
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        struct bytes file = good;
        file.data[cases[i].at] = cases[i].value;
        struct npy array;
        char error[256];
        cr_expect_eq(parse(file.data, file.size, &array, error), -1, "case %zu", i);
        cr_expect_not_null(strstr(error, cases[i].message), "case %zu: '%s'", i, error);
    }
}

/* A length of 2^31 and its neighbours, in the four bytes of version 2. */
Test(npy, huge_headers_are_refused)
{
    static const uint32_t lengths[] = {65537, 1u << 24, 0x7fffffffu, 1u << 31, 0xffffffffu};
    for (size_t i = 0; i < sizeof lengths / sizeof *lengths; i++) {
        struct bytes file = make_file(2, HEADER("<f4", "False", "(2, 3)"), 24);
        for (int byte = 0; byte < 4; byte++)
            file.data[8 + byte] = (unsigned char)(lengths[i] >> 8 * byte & 255);
        struct npy array;
        char error[256];
        cr_expect_eq(parse(file.data, file.size, &array, error), -1);
        cr_expect_not_null(strstr(error, "refused"), "%s", error);
    }
}

Test(npy, every_truncation_is_refused)
{
    for (int major = 1; major <= 3; major++) {
        const struct bytes file = make_file(major, HEADER("<f4", "False", "(2, 3)"), 24);
        for (size_t size = 0; size < file.size; size++) {
            struct npy array;
            char error[256];
            cr_expect_eq(parse(file.data, size, &array, error), -1, "%zu bytes", size);
        }
    }
}

/* Random damage: whatever the outcome, it is an outcome (see parse()). */
Test(npy, random_damage)
{
    uint64_t state = 20;
    int accepted = 0, refused = 0;
    for (int round = 0; round < 40000; round++) {
        struct bytes file = make_file(1 + round % 3, HEADER("<f4", "False", "(2, 3)"), 24);
        uint64_t words[8];
        for (int w = 0; w < 8; w++) {
            state = state * 6364136223846793005u + 1442695040888963407u;
            words[w] = state >> 33;
        }
        for (uint64_t change = 0; change < 1 + words[0] % 3; change++) {
            static const char alphabet[] = "0123456789(),:'\"{}<>f-LTrueFals \n\\\0\xff";
            const uint64_t value = words[2 * change + 1];
            file.data[words[2 * change + 2] % file.size] =
                (unsigned char)alphabet[value % (sizeof alphabet - 1)];
        }
        struct npy array;
        char error[256];
        if (parse(file.data, file.size - words[7] % 2, &array, error) == 0)
            accepted++;
        else
            refused++;
        npy_free(&array);
    }
    /* Both happen: the damage is neither always fatal nor always harmless. */
    cr_expect_gt(accepted, 1000);
    cr_expect_gt(refused, 1000);
}

/* ---------------------------------------------------- files in a folder */

static char folder[64];

static void make_folder(void)
{
    strcpy(folder, "/tmp/qkv-test-XXXXXX");
    cr_assert_not_null(mkdtemp(folder));
}

static void remove_folder(void)
{
    char command[128];
    snprintf(command, sizeof command, "rm -rf '%s'", folder);
    cr_assert_eq(system(command), 0);
}

/* The path of a file in the folder; a few results stay valid at a time. */
static const char *in_folder(const char *name)
{
    static char paths[8][128];
    static int next;
    char *path = paths[next++ % 8];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

static void write_file(const char *path, const void *data, size_t size)
{
    FILE *file = fopen(path, "wb");
    cr_assert_not_null(file, "%s", path);
    cr_assert_eq(fwrite(data, 1, size, file), size);
    cr_assert_eq(fclose(file), 0);
}

static void write_array(const char *name, const float *data, int ndim, const int64_t *shape)
{
    char error[256];
    cr_assert_eq(npy_save(in_folder(name), data, ndim, shape, error, sizeof error), 0, "%s", error);
}

static struct npy read_array(const char *name)
{
    struct npy array;
    char error[256];
    cr_assert_eq(npy_load(in_folder(name), &array, error, sizeof error), 0, "%s: %s", name, error);
    return array;
}

static bool exists(const char *name)
{
    return access(in_folder(name), F_OK) == 0;
}

Test(npy, what_is_saved_can_be_loaded, .init = make_folder, .fini = remove_folder)
{
    enum { COUNT = 3 * 5 * 7 * 1000 };
    static float data[COUNT];
    for (int i = 0; i < COUNT; i++)
        data[i] = ldexpf((float)(i - 50000), i % 97 - 60);
    data[1] = -0.0f;
    data[2] = INFINITY;
    data[3] = NAN;

    const int64_t shape[] = {3, 5, 7, 1000};
    for (int ndim = 0; ndim <= 4; ndim++) {
        write_array("a.npy", data, ndim, shape + 4 - ndim);
        struct npy array = read_array("a.npy");
        cr_expect_eq(array.ndim, ndim);
        for (int d = 0; d < ndim; d++)
            cr_expect_eq(array.shape[d], shape[4 - ndim + d]);
        cr_expect_eq(memcmp(array.data, data, (size_t)array.count * sizeof *data), 0);
        npy_free(&array);
    }
    const int64_t empty[] = {2, 0, 3};
    write_array("a.npy", data, 3, empty);
    struct npy array = read_array("a.npy");
    cr_expect_eq(array.count, 0);
    npy_free(&array);
}

Test(npy, a_failed_save_leaves_the_old_file, .init = make_folder, .fini = remove_folder)
{
    const float data[] = {1.0f, 2.0f};
    const int64_t shape[] = {2};
    char error[256];

    write_array("a.npy", data, 1, shape);
    cr_expect_eq(npy_save(in_folder("none/a.npy"), data, 1, shape, error, sizeof error), -1);
    cr_expect_not_null(strstr(error, "cannot be written"));
    cr_expect_eq(npy_save(folder, data, 1, shape, error, sizeof error), -1);

    /* A full disk, where the system can pretend one. */
    if (access("/dev/full", W_OK) == 0)
        cr_expect_eq(npy_save("/dev/full", data, 1, shape, error, sizeof error), -1);

    /* A limit that is hit half-way, when the temporary file is there already. */
    static const float many[100000];
    const int64_t many_shape[] = {100000};
    struct rlimit limit;
    cr_assert_eq(getrlimit(RLIMIT_FSIZE, &limit), 0);
    const struct rlimit small = {.rlim_cur = 8192, .rlim_max = limit.rlim_max};
    (void)signal(SIGXFSZ, SIG_IGN);
    cr_assert_eq(setrlimit(RLIMIT_FSIZE, &small), 0);
    cr_expect_eq(npy_save(in_folder("a.npy"), many, 1, many_shape, error, sizeof error), -1);
    cr_expect_eq(npy_save(in_folder("new.npy"), many, 1, many_shape, error, sizeof error), -1);
    cr_assert_eq(setrlimit(RLIMIT_FSIZE, &limit), 0);
    cr_expect(!exists("new.npy"));
    struct npy kept = read_array("a.npy");
    cr_expect(kept.count == 2 && kept.data[1] == 2.0f);
    npy_free(&kept);

    /* Saving replaces a link's target and not the link, and leaves nothing else. */
    cr_assert_eq(symlink("a.npy", in_folder("link.npy")), 0);
    const float other[] = {3.0f, 4.0f};
    write_array("link.npy", other, 1, shape);
    struct npy array = read_array("a.npy");
    cr_expect_eq(array.data[0], 3.0f);
    npy_free(&array);
    char command[128];
    snprintf(command, sizeof command, "test \"$(ls '%s' | wc -l)\" -eq 2", folder);
    cr_expect_eq(system(command), 0, "a temporary file was left");
}

Test(npy, what_is_no_array_is_refused, .init = make_folder, .fini = remove_folder)
{
    struct npy array;
    char error[256];

    cr_expect_eq(npy_load(in_folder("none.npy"), &array, error, sizeof error), -1);
    cr_expect_not_null(strstr(error, "cannot be opened"), "%s", error);
    cr_expect_eq(npy_load(folder, &array, error, sizeof error), -1);
    cr_expect_not_null(strstr(error, "not a regular file"), "%s", error);
    /* A pipe that nobody writes to must not make the reader wait. */
    cr_assert_eq(mkfifo(in_folder("pipe.npy"), 0600), 0);
    cr_expect_eq(npy_load(in_folder("pipe.npy"), &array, error, sizeof error), -1);
    cr_expect_not_null(strstr(error, "not a regular file"), "%s", error);
    write_file(in_folder("empty.npy"), "", 0);
    cr_expect_eq(npy_load(in_folder("empty.npy"), &array, error, sizeof error), -1);
    cr_expect_not_null(strstr(error, "not a .npy"), "%s", error);
}

/* The file's size decides before memory is asked for. */
Test(npy, sizes_are_checked_against_the_file, .init = make_folder, .fini = remove_folder)
{
    struct npy array;
    char error[256];

    struct bytes file = make_file(1, HEADER("<f4", "False", "(1099511627776,)"), 24);
    write_file(in_folder("a.npy"), file.data, file.size);
    cr_expect_eq(npy_load(in_folder("a.npy"), &array, error, sizeof error), -1);
    cr_expect_not_null(strstr(error, "truncated"), "%s", error);

    /* A sparse file of 64 GiB behind a small shape. */
    file = make_file(1, HEADER("<f4", "False", "(2, 3)"), 24);
    write_file(in_folder("a.npy"), file.data, file.size);
    if (truncate(in_folder("a.npy"), (off_t)1 << 36) == 0) {
        cr_expect_eq(npy_load(in_folder("a.npy"), &array, error, sizeof error), -1);
        cr_expect_not_null(strstr(error, "too long"), "%s", error);
    }
}

/* --------------------------------------------------------------- the tool */

struct run {
    int code; /* exit code, -1 if the tool was killed */
    char text[16384];
};

/*
 * Runs the tool and collects stdout and stderr together. 'format' is its
 * arguments; "@" stands for the folder.
 */
__attribute__((format(printf, 1, 2))) static struct run tool(const char *format, ...)
{
    char arguments[1024], command[4096];
    const char *path = getenv("QKV_TOOL");
    cr_assert_not_null(path, "QKV_TOOL is not set");
    va_list list;
    va_start(list, format);
    vsnprintf(arguments, sizeof arguments, format, list);
    va_end(list);

    size_t length = (size_t)snprintf(command, sizeof command, "'%s' ", path);
    for (const char *c = arguments; *c; c++) {
        cr_assert_lt(length + sizeof folder + 16, sizeof command);
        if (*c == '@')
            length += (size_t)sprintf(command + length, "%s", folder);
        else
            command[length++] = *c;
    }
    strcpy(command + length, " 2>&1");

    struct run run = {.code = -1};
    FILE *pipe = popen(command, "r");
    cr_assert_not_null(pipe);
    run.text[fread(run.text, 1, sizeof run.text - 1, pipe)] = '\0';
    for (char rest[4096]; fread(rest, 1, sizeof rest, pipe) > 0;)
        ;
    const int status = pclose(pipe);
    if (WIFEXITED(status))
        run.code = WEXITSTATUS(status);
    return run;
}

static int lines(const char *text)
{
    int count = 0;
    for (; *text; text++)
        count += *text == '\n';
    return count;
}

/* The tool refuses with exit code 2 and one line that begins with "qkv: ". */
static void expect_refusal(const struct run *run, const char *part)
{
    cr_expect_eq(run->code, 2, "exit code %d: %s", run->code, run->text);
    cr_expect_eq(strncmp(run->text, "qkv: ", 5), 0, "%s", run->text);
    cr_expect_eq(lines(run->text), 1, "%s", run->text);
    cr_expect_not_null(strstr(run->text, part), "'%s' is not in: %s", part, run->text);
}

/* A sequence of unremarkable numbers from -1 to 1. */
static void fill(float *data, int64_t count, uint32_t seed)
{
    for (int64_t i = 0; i < count; i++) {
        seed = seed * 1664525u + 1013904223u;
        data[i] = (float)(seed >> 8) * 0x1p-23f - 1.0f;
    }
}

static void write_random(const char *name, uint32_t seed, int ndim, const int64_t *shape)
{
    float data[512];
    int64_t count = 1;
    for (int d = 0; d < ndim; d++)
        count *= shape[d];
    cr_assert_leq(count, 512);
    fill(data, count, seed);
    write_array(name, data, ndim, shape);
}

Test(tool, explains_itself)
{
    const struct run alone = tool("%s", ""), help = tool("--help"), version = tool("--version");
    cr_expect(alone.code == 0 && strstr(alone.text, "qkv attend"));
    cr_expect(help.code == 0 && strcmp(alone.text, help.text) == 0);
    cr_expect(version.code == 0 && strncmp(version.text, "qkv 0.", 6) == 0, "%s", version.text);
    static const char *const commands[] = {"attend", "layer", "info"};
    for (int i = 0; i < 3; i++) {
        const struct run run = tool("%s --help", commands[i]);
        cr_expect(run.code == 0 && strncmp(run.text, "usage: qkv ", 11) == 0, "%s", run.text);
    }
}

Test(tool, bad_options_give_a_usage_line)
{
    static const char *const arguments[] = {
        "attend",
        "attend q k",
        "attend q k v",
        "attend q k v w -o o",
        "attend q k v -o",
        "attend q k v -o o --scale",
        "attend q k v -o o --unknown",
        "attend q k v -o o --o=x",
        "attend q k v -o o --causal=yes",
        "attend q k v -o o -causal",
        "layer x",
        "layer --svg",
        "info x",
    };
    for (size_t i = 0; i < sizeof arguments / sizeof *arguments; i++) {
        const struct run run = tool("%s", arguments[i]);
        cr_expect(run.code == 2 && strstr(run.text, "\nusage: qkv "), "%s: %d %s", arguments[i],
                  run.code, run.text);
    }
    static const char *const values[] = {
        "--scale x",    "--scale nan", "--scale inf",
        "--scale 1e39", "--scale ''",  "--repeat 0",
        "--repeat 1x",  "--repeat -1", "--repeat 99999999999999999999",
        "--isa none",   "--isa ''",
    };
    for (size_t i = 0; i < sizeof values / sizeof *values; i++) {
        const struct run run = tool("attend q k v -o o %s", values[i]);
        expect_refusal(&run, values[i][2] == 's'   ? "--scale"
                             : values[i][2] == 'r' ? "--repeat"
                                                   : "--isa");
    }
    const struct run run = tool("nonsense");
    expect_refusal(&run, "nonsense");
}

Test(tool, info_names_the_isa_in_use)
{
    const struct run run = tool("info");
    cr_expect_eq(run.code, 0);
    cr_expect_not_null(strstr(run.text, "\n* "), "%s", run.text);
    setenv("QKV_ISA", "scalar", 1);
    const struct run lowered = tool("info");
    cr_expect_not_null(strstr(lowered.text, "\n* scalar"), "%s", lowered.text);
    cr_expect_not_null(strstr(lowered.text, "QKV_ISA=scalar: scalar is used\n"), "%s",
                       lowered.text);
    setenv("QKV_ISA", "nonsense", 1);
    const struct run ignored = tool("info");
    cr_expect_not_null(strstr(ignored.text, "ignored"), "%s", ignored.text);
}

Test(tool, corrupt_files_are_refused, .init = make_folder, .fini = remove_folder)
{
    static const struct {
        const char *header, *message;
    } cases[] = {
        {HEADER("<f8", "False", "(2, 3)"), "K.npy: element type '<f8'"},
        {HEADER(">f4", "False", "(2, 3)"), "K.npy: element type '>f4'"},
        {HEADER("<f4", "True", "(2, 3)"), "K.npy: Fortran order"},
        {HEADER("<f4", "False", "(2, 4)"), "K.npy: truncated"},
        {HEADER("<f4", "False", "(2, 2)"), "K.npy: too long"},
        {HEADER("<f4", "False", "(-2, 3)"), "K.npy: a dimension of the shape is negative"},
        {HEADER("<f4", "False", "(4294967296, 4294967296)"), "K.npy: the shape has more"},
        {HEADER("<f4", "False", "(1, 1, 1, 2, 3)"), "K.npy: more than 4 dimensions"},
    };
    write_random("Q.npy", 1, 2, (const int64_t[]){2, 3});
    write_random("V.npy", 2, 2, (const int64_t[]){2, 3});
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        const struct bytes file = make_file(1, cases[i].header, 24);
        write_file(in_folder("K.npy"), file.data, file.size);
        const struct run run = tool("attend @/Q.npy @/K.npy @/V.npy -o @/O.npy");
        expect_refusal(&run, cases[i].message);
        cr_expect(!exists("O.npy"));
    }
    const struct run missing = tool("attend @/Q.npy @/none.npy @/V.npy -o @/O.npy");
    expect_refusal(&missing, "none.npy: cannot be opened");
}

Test(tool, shapes_that_do_not_fit_are_refused, .init = make_folder, .fini = remove_folder)
{
    static const struct {
        int q_ndim, k_ndim, v_ndim;
        int64_t q[4], k[4], v[4];
        const char *message;
    } cases[] = {
        {1, 2, 2, {6}, {2, 3}, {2, 3}, "fewer than 2 dimensions"},
        {0, 2, 2, {0}, {2, 3}, {2, 3}, "fewer than 2 dimensions"},
        {2, 2, 2, {2, 3}, {2, 4}, {2, 3}, "head size (last dimension) differs"},
        {2, 2, 2, {2, 3}, {4, 3}, {5, 3}, "number of tokens differs"},
        {2, 3, 3, {2, 3}, {1, 4, 3}, {1, 4, 3}, "number of dimensions differs"},
        {3, 3, 2, {1, 2, 3}, {1, 4, 3}, {4, 3}, "number of dimensions differs"},
        {3, 3, 3, {3, 2, 3}, {2, 4, 3}, {2, 4, 3}, "Q's heads are not a multiple of K's"},
        {3, 3, 3, {4, 2, 3}, {2, 4, 3}, {4, 4, 3}, "number of heads differs"},
        {4, 4, 4, {2, 1, 2, 3}, {1, 1, 2, 3}, {1, 1, 2, 3}, "batch differs"},
        {4, 4, 4, {2, 1, 2, 3}, {2, 1, 2, 3}, {1, 1, 2, 3}, "batch differs"},
        {3, 3, 3, {2, 2, 3}, {0, 4, 3}, {0, 4, 3}, "no elements"},
        {4, 4, 4, {0, 2, 2, 3}, {0, 2, 2, 3}, {0, 2, 2, 3}, "no elements"},
        {2, 2, 2, {2, 0}, {2, 0}, {2, 3}, "no elements"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        write_random("Q.npy", 1, cases[i].q_ndim, cases[i].q);
        write_random("K.npy", 2, cases[i].k_ndim, cases[i].k);
        write_random("V.npy", 3, cases[i].v_ndim, cases[i].v);
        const struct run run = tool("attend @/Q.npy @/K.npy @/V.npy -o @/O.npy");
        expect_refusal(&run, cases[i].message);
        cr_expect(!exists("O.npy"), "case %zu", i);
    }
}

/* The definition, in f64, for one query that sees the first 'visible' keys. */
static void attend_exactly(const float *q, const float *keys, const float *values, int64_t visible,
                           int64_t n, int64_t m, double scale, double *weights, double *out,
                           double *lse)
{
    double max = -HUGE_VAL, sum = 0.0;
    for (int64_t j = 0; j < visible; j++) {
        weights[j] = 0.0;
        for (int64_t d = 0; d < n; d++)
            weights[j] += scale * (double)q[d] * (double)keys[j * n + d];
        max = fmax(max, weights[j]);
    }
    for (int64_t j = 0; j < visible; j++)
        sum += weights[j] = exp(weights[j] - max);
    *lse = visible ? max + log(sum) : -HUGE_VAL;
    for (int64_t d = 0; d < m; d++)
        out[d] = 0.0;
    for (int64_t j = 0; j < visible; j++) {
        weights[j] /= sum;
        for (int64_t d = 0; d < m; d++)
            out[d] += weights[j] * (double)values[j * m + d];
    }
}

/*
 * Two batches, four heads of Q on two of K and V, more queries than keys so
 * that the first rows see none: compares output, weights and LSE.
 *
 * All inputs are within 1 in magnitude, the scale is 2 and there are 4
 * elements and 5 keys: by the bounds in qkv.h a logit is off by at most
 * (4 + 2) u 2 * 4 = 48 u, a weight by 2 * 48 u + 16 u, an output by
 * 2 * 48 u + (512 + 1 + 32) u, and the LSE by 48 u and some roundings of a
 * number below 10. 1024 u covers each.
 */
static void check_attend(bool causal)
{
    enum { B = 2, H = 4, KV = 2, LQ = 7, LK = 5, N = 4, M = 3 };
    const double bound = 1024 * 0x1p-24, scale = 2.0;
    write_random("Q.npy", 1, 4, (const int64_t[]){B, H, LQ, N});
    write_random("K.npy", 2, 4, (const int64_t[]){B, KV, LK, N});
    write_random("V.npy", 3, 4, (const int64_t[]){B, KV, LK, M});
    const struct run run = tool("attend @/Q.npy @/K.npy @/V.npy -o @/O.npy --scale %g%s "
                                "--weights=@/A.npy --lse @/L.npy",
                                scale, causal ? " --causal" : "");
    cr_assert_eq(run.code, 0, "%s", run.text);
    cr_expect_str_empty(run.text);

    struct npy q = read_array("Q.npy"), k = read_array("K.npy"), v = read_array("V.npy");
    struct npy o = read_array("O.npy"), a = read_array("A.npy"), l = read_array("L.npy");
    cr_assert(o.ndim == 4 && o.shape[1] == H && o.shape[2] == LQ && o.shape[3] == M);
    cr_assert(a.ndim == 4 && a.shape[1] == H && a.shape[2] == LQ && a.shape[3] == LK);
    cr_assert(l.ndim == 3 && l.shape[0] == B && l.shape[1] == H && l.shape[2] == LQ);

    for (int64_t row = 0; row < B * H * LQ; row++) {
        const int64_t i = row % LQ, kv_head = row / LQ / (H / KV);
        const int64_t visible = !causal ? LK : i + LK - LQ + 1 > 0 ? i + LK - LQ + 1 : 0;
        double weights[LK] = {0}, out[M], lse;
        attend_exactly(q.data + row * N, k.data + kv_head * LK * N, v.data + kv_head * LK * M,
                       visible, N, M, scale, weights, out, &lse);
        for (int64_t d = 0; d < M; d++)
            cr_expect_leq(fabs((double)o.data[row * M + d] - out[d]), bound, "row %d", (int)row);
        for (int64_t j = 0; j < visible; j++)
            cr_expect_leq(fabs((double)a.data[row * LK + j] - weights[j]), bound, "row %d",
                          (int)row);
        for (int64_t j = visible; j < LK; j++)
            cr_expect_eq(a.data[row * LK + j], 0.0f);
        if (visible)
            cr_expect_leq(fabs((double)l.data[row] - lse), bound);
        else
            cr_expect_eq(l.data[row], -INFINITY);
    }
    struct npy *const all[] = {&q, &k, &v, &o, &a, &l};
    for (int i = 0; i < 6; i++)
        npy_free(all[i]);
}

Test(tool, attend_computes_attention, .init = make_folder, .fini = remove_folder)
{
    check_attend(false);
}

Test(tool, attend_computes_causal_attention, .init = make_folder, .fini = remove_folder)
{
    check_attend(true);
}

Test(tool, attend_takes_fewer_dimensions, .init = make_folder, .fini = remove_folder)
{
    for (int ndim = 2; ndim <= 3; ndim++) {
        const int64_t q[] = {2, 3, 4}, kv[] = {1, 5, 4};
        write_random("Q.npy", 1, ndim, q + 3 - ndim);
        write_random("K.npy", 2, ndim, kv + 3 - ndim);
        write_random("V.npy", 3, ndim, kv + 3 - ndim);
        const struct run run = tool("attend @/Q.npy @/K.npy @/V.npy -o @/O.npy --repeat 3 "
                                    "--isa scalar --lse @/L.npy");
        cr_assert_eq(run.code, 0, "%s", run.text);
        cr_expect(strncmp(run.text, "median ", 7) == 0 && strstr(run.text, " ms of 3 runs, scalar"),
                  "%s", run.text);
        struct npy o = read_array("O.npy"), l = read_array("L.npy");
        cr_expect(o.ndim == ndim && o.shape[ndim - 2] == 3 && o.shape[ndim - 1] == 4);
        cr_expect(l.ndim == ndim - 1 && l.shape[ndim - 2] == 3);
        npy_free(&o);
        npy_free(&l);
    }
}

Test(tool, attend_without_keys_gives_zeros, .init = make_folder, .fini = remove_folder)
{
    write_random("Q.npy", 1, 2, (const int64_t[]){3, 4});
    write_random("K.npy", 2, 2, (const int64_t[]){0, 4});
    write_random("V.npy", 3, 2, (const int64_t[]){0, 2});
    const struct run run =
        tool("attend @/Q.npy @/K.npy @/V.npy -o @/O.npy --lse @/L.npy --weights @/A.npy");
    cr_assert_eq(run.code, 0, "%s", run.text);
    struct npy o = read_array("O.npy"), l = read_array("L.npy"), a = read_array("A.npy");
    cr_assert_eq(o.count, 6);
    for (int i = 0; i < 6; i++)
        cr_expect_eq(o.data[i], 0.0f);
    cr_expect_eq(l.data[2], -INFINITY);
    cr_expect(a.ndim == 2 && a.shape[0] == 3 && a.shape[1] == 0);
    npy_free(&o);
    npy_free(&l);
    npy_free(&a);
}

Test(tool, output_that_cannot_be_written, .init = make_folder, .fini = remove_folder)
{
    write_random("Q.npy", 1, 2, (const int64_t[]){3, 4});
    const struct run run = tool("attend @/Q.npy @/Q.npy @/Q.npy -o @/none/O.npy");
    expect_refusal(&run, "O.npy: cannot be written");
    if (access("/dev/full", W_OK) == 0) {
        const struct run full = tool("info >/dev/full");
        cr_expect_eq(full.code, 2);
    }
}

/* -------------------------------------------------------------- the layer */

static const char *minilm(void)
{
    static char path[1024];
    const char *data = getenv("QKV_DATA");
    cr_assert_not_null(data, "QKV_DATA is not set");
    snprintf(path, sizeof path, "%s/minilm", data);
    return path;
}

/* The recorded layer in the test's folder, as links that a test can replace. */
static void link_layer(void)
{
    char command[2048];
    make_folder();
    snprintf(command, sizeof command, "ln -s '%s'/* '%s'", minilm(), folder);
    cr_assert_eq(system(command), 0);
}

static char *read_text(const char *name)
{
    FILE *file = fopen(in_folder(name), "rb");
    cr_assert_not_null(file, "%s", name);
    char *text = calloc(1, 1 << 20);
    cr_assert_not_null(text);
    cr_assert_lt(fread(text, 1, (1 << 20) - 1, file), 300000u, "%s is too large", name);
    (void)fclose(file);
    return text;
}

Test(tool, layer_agrees_with_pytorch)
{
    const struct run sentence = tool("layer --data '%s'", minilm());
    cr_expect_eq(sentence.code, 0, "%s", sentence.text);
    cr_expect_not_null(
        strstr(sentence.text, "Head 1 gives 0.64 of the attention of \"it\" to \"animal\"."), "%s",
        sentence.text);
    /* Colours are for terminals. */
    cr_expect_null(strchr(sentence.text, '\033'));
    const struct run text = tool("layer --data '%s' --input text --no-map", minilm());
    cr_expect_eq(text.code, 0, "%s", text.text);
    const struct run scalar = tool("layer --data '%s' --isa scalar --no-map", minilm());
    cr_expect_eq(scalar.code, 0, "%s", scalar.text);
    cr_expect_not_null(strstr(scalar.text, "ISA scalar"), "%s", scalar.text);
}

/* One recorded number that is off by 0.001, or is NaN, is noticed. */
Test(tool, layer_notices_a_difference, .init = link_layer, .fini = remove_folder)
{
    static const char *const names[] = {"sentence_out.npy", "sentence_context.npy",
                                        "sentence_weights.npy"};
    for (int n = 0; n < 3; n++) {
        for (int change = 0; change < 2; change++) {
            struct npy array = read_array(names[n]);
            array.data[array.count / 2] += change ? NAN : 0.001f;
            cr_assert_eq(unlink(in_folder(names[n])), 0);
            write_array(names[n], array.data, array.ndim, array.shape);
            const struct run run = tool("layer --data @ --no-map");
            cr_expect_eq(run.code, 1, "%s: %s", names[n], run.text);
            cr_expect_not_null(strstr(run.text, "BEYOND THE TOLERANCE"), "%s", run.text);
            npy_free(&array);
        }
        cr_assert_eq(unlink(in_folder(names[n])), 0);
        char command[2048];
        snprintf(command, sizeof command, "ln -s '%s/%s' '%s'", minilm(), names[n], folder);
        cr_assert_eq(system(command), 0);
    }
    const struct run restored = tool("layer --data @ --no-map");
    cr_expect_eq(restored.code, 0, "%s", restored.text);
}

Test(tool, layer_draws_a_picture, .init = link_layer, .fini = remove_folder)
{
    /* Words that XML or a terminal would take for something else. */
    static const char words[] =
        "[CLS]\nthe\n<a&b>\n\"\ndidn\n\xff\x1b[1m\nt\nthe\nstreet\n]]>\nit\n"
        "was\n\xc3\xa9t\xc3\xa9\ntired\n[SEP]\n";
    cr_assert_eq(unlink(in_folder("sentence_tokens.txt")), 0);
    write_file(in_folder("sentence_tokens.txt"), words, sizeof words - 1);
    const struct run run = tool("layer --data @ --svg @/a.svg --head mean");
    cr_assert_eq(run.code, 0, "%s", run.text);
    cr_expect_null(strchr(run.text, '\033'), "%s", run.text);

    char *svg = read_text("a.svg");
    cr_expect_eq(strncmp(svg, "<?xml ", 6), 0);
    cr_expect_not_null(strstr(svg, "</svg>"));
    cr_expect_not_null(strstr(svg, "&lt;a&amp;b&gt;"));
    cr_expect_not_null(strstr(svg, "\xc3\xa9t\xc3\xa9"));
    cr_expect_null(strstr(svg, "<a&"));
    cr_expect_null(strstr(svg, "]]>"));
    cr_expect_null(strchr(svg, '\033'));
    cr_expect_null(strchr(svg, '\xff'));
    cr_expect_not_null(strstr(svg, ">head 11<"));
    free(svg);
}

Test(tool, layer_refuses_data_that_does_not_fit, .init = link_layer, .fini = remove_folder)
{
    struct run run = tool("layer --data @ --token nonsense");
    cr_expect(run.code == 2 && strstr(run.text, "no token 'nonsense'"), "%s", run.text);
    run = tool("layer --data @ --head 12");
    cr_expect(run.code == 2 && strstr(run.text, "--head"), "%s", run.text);
    run = tool("layer --data @ --input none");
    expect_refusal(&run, "none_x.npy: cannot be opened");
    run = tool("layer --data @/none");
    expect_refusal(&run, "cannot be opened");

    cr_assert_eq(unlink(in_folder("wq.npy")), 0);
    write_random("wq.npy", 1, 2, (const int64_t[]){3, 4});
    run = tool("layer --data @");
    expect_refusal(&run, "wq.npy: the shape is [3, 4]");
    cr_assert_eq(unlink(in_folder("sentence_tokens.txt")), 0);
    cr_assert_eq(unlink(in_folder("wq.npy")), 0);
    cr_assert_eq(symlink("wk.npy", in_folder("wq.npy")), 0);
    write_file(in_folder("sentence_tokens.txt"), "it\n", 3);
    run = tool("layer --data @");
    expect_refusal(&run, "sentence_tokens.txt: 1 lines, but the input has 15 tokens");
}
