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
 * (iteratively reweighted least squares in f64 on 4001 Chebyshev nodes). c1 is
 * rounded to f32 first and the others fitted again, then c2 is, and so on:
 * 3.0e-9 for 2^f and 3.1e-9 for e^f, a twentieth of u = 2^-24. Rounding all six
 * at the end leaves 1.6e-8, which is a quarter of an ulp where p is near 0.7.
 * Degree 5 has 9.2e-8: too much for a result within 1 ulp, but not for a weight
 * within a tile, which may be off by 16 u: QKV_EXP2_TILE, fitted and rounded the
 * same way, has 9.3e-8 = 1.6 u. The worst case
 * over every f32, rounding included, is printed by the test suite. As
 * p(0) = 1 holds exactly, exp(0) = 1 does.
 */
#ifndef QKV_CONSTANTS_H
#define QKV_CONSTANTS_H

#define QKV_EXP2_C1 0x1.62e430p-1f
#define QKV_EXP2_C2 0x1.ebfbdcp-3f
#define QKV_EXP2_C3 0x1.c6af7cp-5f
#define QKV_EXP2_C4 0x1.3b2de0p-7f
#define QKV_EXP2_C5 0x1.5f082ep-10f
#define QKV_EXP2_C6 0x1.416b50p-13f

#define QKV_EXP2_TILE_C1 0x1.62e42ap-1f
#define QKV_EXP2_TILE_C2 0x1.ebf9c2p-3f
#define QKV_EXP2_TILE_C3 0x1.c6b6d8p-5f
#define QKV_EXP2_TILE_C4 0x1.3ce8acp-7f
#define QKV_EXP2_TILE_C5 0x1.5bda3cp-10f

/* The same for f in [0, 1), t = floor(t) + f: 8.2e-8 = 1.4 u. */
#define QKV_EXP2_FLOOR_C1 0x1.62e4bap-1f
#define QKV_EXP2_FLOOR_C2 0x1.ebdb6ap-3f
#define QKV_EXP2_FLOOR_C3 0x1.c91c10p-5f
#define QKV_EXP2_FLOOR_C4 0x1.277c1cp-7f
#define QKV_EXP2_FLOOR_C5 0x1.e96910p-10f

#define QKV_EXP_C1 1.0f
#define QKV_EXP_C2 0x1.fffffcp-2f
#define QKV_EXP_C3 0x1.555492p-3f
#define QKV_EXP_C4 0x1.5558b0p-5f
#define QKV_EXP_C5 0x1.12398ap-7f
#define QKV_EXP_C6 0x1.6a4d4ap-10f

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

/*
 * tanh(x) = x + x z (c0 + c1 z + ... + c6 z^6) with z = x^2 for |x| <= 1, made
 * like the others: its largest relative error is 4.7e-9, a thirteenth of u.
 * Beyond, tanh|x| = 1 - 2 e / (1 + e) with e = e^(-2|x|) <= 0.136: what is
 * subtracted is at most 0.24, and its error of some 3.5 u counts a quarter.
 */
#define QKV_TANH_C0 -0x1.55553cp-2f
#define QKV_TANH_C1 0x1.110be4p-3f
#define QKV_TANH_C2 -0x1.b9623cp-5f
#define QKV_TANH_C3 0x1.6009c0p-6f
#define QKV_TANH_C4 -0x1.04606ap-7f
#define QKV_TANH_C5 0x1.2da1e0p-9f
#define QKV_TANH_C6 -0x1.77d222p-12f

#endif
