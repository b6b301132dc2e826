/* SPDX-License-Identifier: MIT */
#ifndef QKV_VERSION_H
#define QKV_VERSION_H

/*
 * The version of the header a program was compiled with. The build reads
 * the project version and the soname from these three lines; qkv_version()
 * tells the version of the library that was linked.
 */
#define QKV_VERSION_MAJOR 0
#define QKV_VERSION_MINOR 1
#define QKV_VERSION_PATCH 0

#define QKV_VERSION (QKV_VERSION_MAJOR * 10000 + QKV_VERSION_MINOR * 100 + QKV_VERSION_PATCH)

#endif
