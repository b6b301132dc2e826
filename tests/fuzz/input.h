/* SPDX-License-Identifier: MIT */
/* A fuzzer's bytes, taken one value after the other; all are 0 once used up. */
#ifndef FUZZ_INPUT_H
#define FUZZ_INPUT_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__has_feature)
#if __has_feature(memory_sanitizer)
#include <sanitizer/msan_interface.h>
#define FORGET(at, bytes) __msan_poison(at, bytes)
#endif
#endif
#ifndef FORGET
#define FORGET(at, bytes) ((void)(at), (void)(bytes))
#endif

typedef struct input {
    const uint8_t *at;
    size_t left;
} input;

static inline uint64_t take(input *in, size_t bytes)
{
    uint64_t value = 0;
    for (size_t i = 0; i < bytes && in->left > 0; i++, in->left--)
        value |= (uint64_t)*in->at++ << 8 * i;
    return value;
}

/* low .. high, both included. */
static inline int64_t take_int(input *in, int64_t low, int64_t high)
{
    return low + (int64_t)(take(in, high - low < 256 ? 1 : 2) % (uint64_t)(high - low + 1));
}

/* NaNs of every type, which count as not initialised where that is watched. */
static inline void make_unknown(void *at, size_t bytes)
{
    if (bytes == 0)
        return;
    memset(at, 0xff, bytes);
    FORGET(at, bytes);
}

#endif
