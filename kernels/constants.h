/* SPDX-License-Identifier: MIT */
/*
 * Coefficients of the exponentials, shared by every ISA. Constants only.
 *
 * 2^t = 2^n * p(f) with n = round(t), f = t - n exact, |f| <= 1/2, and
 * e^x = 2^n * p(f) with n = round(x * log2(e)), f = x - n * ln(2), the
 * product in two parts, |f| <= ln(2)/2 (a little more after rounding).
 *
 * p(f) = 1 + f * (c1 + f * (c2 + ... + f * c6)) is the polynomial of degree
 * 6 with p(0) = 1 that has the least largest relative error on its interval
 * (iteratively reweighted least squares in f64 on 400 Chebyshev nodes,
 * coefficients then rounded to f32): 2.0e-9, a thirtieth of half an ulp.
 * Degree 5 has 9.2e-8, which is 1.5 half-ulps: too much for a result within
 * 1 ulp. The rounding of Horner's rule adds up to about 0.8 ulp; the worst
 * case over every f32 is printed by the test suite. As p(0) = 1 holds
 * exactly, exp(0) = 1 does.
 */
#ifndef QKV_CONSTANTS_H
#define QKV_CONSTANTS_H

#define QKV_EXP2_C1 0x1.62e430p-1f
#define QKV_EXP2_C2 0x1.ebfbdcp-3f
#define QKV_EXP2_C3 0x1.c6aee8p-5f
#define QKV_EXP2_C4 0x1.3b2d4ep-7f
#define QKV_EXP2_C5 0x1.5f3e68p-10f
#define QKV_EXP2_C6 0x1.41fbbap-13f

#define QKV_EXP_C1 1.0f
#define QKV_EXP_C2 0x1.fffffcp-2f
#define QKV_EXP_C3 0x1.55541ap-3f
#define QKV_EXP_C4 0x1.555822p-5f
#define QKV_EXP_C5 0x1.126792p-7f
#define QKV_EXP_C6 0x1.6ae72ep-10f

#define QKV_LOG2E 0x1.715476p+0f

/* ln(2) for reductions with fused multiply-add: HI + LO = ln(2) (1 + 2^-53). */
#define QKV_LN2_HI 0x1.62e430p-1f
#define QKV_LN2_LO (-0x1.05c610p-29f)

/* Without it: HI has 16 bits, so that n * HI is exact for |n| < 256. */
#define QKV_LN2_HI16 0x1.62e4p-1f
#define QKV_LN2_LO16 0x1.7f7d1cp-20f

/*
 * Below this t = log2 of the result is 0: 2^-150 is half the smallest
 * denormal. Arguments are clamped to it first, so that n stays small.
 */
#define QKV_EXP2_MIN (-151.0f)

/* x below this gives e^x < 2^-150. */
#define QKV_EXP_MIN (-104.7f)

/*
 * Adding 1.5 * 2^23 + 127 rounds a small number to an integer n and leaves
 * n + 127, the biased exponent of 2^n, in the low bits of the sum.
 */
#define QKV_ROUND_MAGIC 12583039.0f

#endif
