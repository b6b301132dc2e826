/* SPDX-License-Identifier: MIT */
#include "kv.h"

#include <math.h>
#include <string.h>

enum { BLOCK = 32 };

/* A float of few bits; 'finite_top': numbers at the highest exponent, too. */
typedef struct small_float {
    int exponent_bits, fraction_bits, finite_top;
    double largest;
} small_float;

static const small_float f16 = {5, 10, 0, 65504.0};
static const small_float bf16 = {8, 7, 0, 0x1.fep127};
static const small_float e4m3 = {4, 3, 1, 448.0};
static const small_float e5m2 = {5, 2, 0, 57344.0};

static int bias_of(small_float f)
{
    return (1 << (f.exponent_bits - 1)) - 1;
}

static double decode(small_float f, unsigned bits)
{
    const int top = (1 << f.exponent_bits) - 1, whole = 1 << f.fraction_bits;
    const int exponent = (int)(bits >> f.fraction_bits) & top;
    const int fraction = (int)bits & (whole - 1);
    const double sign = bits >> (f.exponent_bits + f.fraction_bits) & 1 ? -1.0 : 1.0;
    if (exponent == top && f.finite_top && fraction == whole - 1)
        return (double)NAN;
    if (exponent == top && !f.finite_top)
        return fraction ? (double)NAN : sign * (double)INFINITY;
    if (exponent == 0)
        return sign * ldexp(fraction, 1 - bias_of(f) - f.fraction_bits);
    return sign * ldexp(fraction + whole, exponent - bias_of(f) - f.fraction_bits);
}

/* A finite x rounded to nearest even, at most the largest: the bits. */
static unsigned encode(small_float f, double x)
{
    const unsigned sign = signbit(x) ? 1u << (f.exponent_bits + f.fraction_bits) : 0;
    const double magnitude = fabs(x);
    int exponent = magnitude > 0 ? ilogb(magnitude) : -1000;
    if (exponent < 1 - bias_of(f))
        exponent = 1 - bias_of(f);
    const double step = ldexp(1.0, exponent - f.fraction_bits);
    double rounded = nearbyint(magnitude / step) * step;
    if (rounded > f.largest)
        rounded = f.largest;
    /* The encodings of positive numbers are in order: search for it. */
    unsigned low = 0, high = 1u << (f.exponent_bits + f.fraction_bits);
    while (high - low > 1) {
        const unsigned middle = (low + high) / 2;
        const double value = decode(f, middle);
        if (value <= rounded) /* false for a NaN, which are the highest */
            low = middle;
        else
            high = middle;
    }
    return sign | low;
}

static unsigned load_16(const void *p)
{
    const unsigned char *b = p;
    return b[0] | (unsigned)b[1] << 8;
}

static void store_16(void *p, unsigned x)
{
    unsigned char *b = p;
    b[0] = (unsigned char)x;
    b[1] = (unsigned char)(x >> 8);
}

int64_t oracle_kv_bytes(kv_format format, int64_t n)
{
    switch (format) {
    case KV_F16:
    case KV_BF16:
        return 2 * n;
    case KV_Q8_0:
        return n / BLOCK * 34;
    case KV_Q4_0:
        return n / BLOCK * 18;
    default:
        return n;
    }
}

int64_t oracle_kv_step(kv_format format)
{
    return format == KV_Q8_0 || format == KV_Q4_0 ? BLOCK : 1;
}

size_t oracle_kv_align(kv_format f)
{
    return f == KV_F16 || f == KV_BF16 ? 2 : 1;
}

double oracle_kv_element(kv_format format, const void *row, int64_t i, float scale)
{
    const unsigned char *bytes = row;
    const unsigned char *q8 = bytes + i / BLOCK * 34, *q4 = bytes + i / BLOCK * 18;
    const int at = (int)(i % BLOCK);
    switch (format) {
    case KV_F16:
        return decode(f16, load_16(bytes + 2 * i));
    case KV_BF16:
        return decode(bf16, load_16(bytes + 2 * i));
    case KV_F8_E4M3:
        return decode(e4m3, bytes[i]);
    case KV_F8_E5M2:
        return decode(e5m2, bytes[i]);
    case KV_I8:
        return (double)scale * (signed char)bytes[i];
    case KV_Q8_0:
        return decode(f16, load_16(q8)) * (signed char)q8[2 + at];
    default:
        return decode(f16, load_16(q4)) * ((q4[2 + at % 16] >> (at < 16 ? 0 : 4) & 15) - 8);
    }
}

/* The quotient and the product of two f32, rounded to f32: f64 holds the
 * product exactly, and enough of the quotient that rounding again is right. */
static float divided(float a, float b)
{
    return (float)((double)a / (double)b);
}

static float multiplied(float a, float b)
{
    return (float)((double)a * (double)b);
}

/* The first element of the largest magnitude; 0 unless all are finite. */
static int largest(const float *x, int64_t n, float *element)
{
    *element = 0.0f;
    for (int64_t i = 0; i < n; i++) {
        if (!isfinite(x[i])) {
            *element = 0.0f;
            return 0;
        }
        if (fabsf(x[i]) > fabsf(*element))
            *element = x[i];
    }
    return 1;
}

static double limited(double x, double low, double high)
{
    return fmin(fmax(x, low), high);
}

static void encode_integers(const float *x, int64_t n, float d, signed char *y)
{
    const float inverse = fabsf(d) < 0x1p-126f ? 0.0f : divided(1.0f, d);
    for (int64_t i = 0; i < n; i++)
        y[i] = (signed char)nearbyint(limited((double)multiplied(x[i], inverse), -127.0, 127.0));
}

static void encode_i8(const float *x, int64_t n, signed char *y, float *scale)
{
    float m;
    if (!largest(x, n, &m)) {
        memset(y, 0, (size_t)n);
        *scale = NAN;
        return;
    }
    const float d = divided(fabsf(m), 127.0f);
    *scale = d < 0x1p-126f ? 0.0f : d;
    encode_integers(x, n, d, y);
}

static void encode_q8_0(const float *x, unsigned char *y)
{
    float m;
    if (!largest(x, BLOCK, &m)) {
        store_16(y, 0x7e00);
        memset(y + 2, 0, BLOCK);
        return;
    }
    const float d = (float)limited((double)divided(fabsf(m), 127.0f), 0.0, 65504.0);
    store_16(y, encode(f16, (double)d));
    encode_integers(x, BLOCK, d, (signed char *)y + 2);
}

static void encode_q4_0(const float *x, unsigned char *y)
{
    float m;
    if (!largest(x, BLOCK, &m)) {
        store_16(y, 0x7e00);
        memset(y + 2, 0x88, 16);
        return;
    }
    const float d = (float)limited((double)divided(m, -8.0f), -65504.0, 65504.0);
    const float inverse = fabsf(d) < 0x1p-126f ? 0.0f : divided(1.0f, d);
    store_16(y, encode(f16, (double)d));
    memset(y + 2, 0, 16);
    for (int i = 0; i < BLOCK; i++) {
        const float e = (float)limited((double)multiplied(x[i], inverse), -8.0, 7.0);
        const int nibble = (int)floor((double)(float)((double)e + 8.5));
        y[2 + i % 16] = (unsigned char)(y[2 + i % 16] | nibble << (i < 16 ? 0 : 4));
    }
}

/* f16 and bf16 overflow to infinity; the 8-bit floats do not. */
static unsigned encode_float(kv_format format, float x)
{
    const small_float of[KV_FORMATS] = {
        [KV_F16] = f16, [KV_BF16] = bf16, [KV_F8_E4M3] = e4m3, [KV_F8_E5M2] = e5m2};
    const small_float f = of[format];
    const unsigned magnitude = (1u << (f.exponent_bits + f.fraction_bits)) - 1;
    if (isnan(x))
        return (signbit(x) ? magnitude + 1 : 0) | magnitude;
    if (isinf(x))
        x = copysignf(0x1.fffffep127f, x);
    return encode(f, (double)x);
}

void oracle_kv_encode(kv_format format, const float *x, int64_t n, void *row, float *scale)
{
    unsigned char *bytes = row;
    switch (format) {
    case KV_I8:
        encode_i8(x, n, row, scale);
        return;
    case KV_Q8_0:
        for (int64_t i = 0; i < n; i += BLOCK)
            encode_q8_0(x + i, bytes + i / BLOCK * 34);
        return;
    case KV_Q4_0:
        for (int64_t i = 0; i < n; i += BLOCK)
            encode_q4_0(x + i, bytes + i / BLOCK * 18);
        return;
    case KV_F16:
    case KV_BF16:
        for (int64_t i = 0; i < n; i++)
            store_16(bytes + 2 * i, encode_float(format, x[i]));
        return;
    default:
        for (int64_t i = 0; i < n; i++)
            bytes[i] = (unsigned char)encode_float(format, x[i]);
    }
}
