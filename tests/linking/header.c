/* SPDX-License-Identifier: MIT */
/*
 * The public header as any program meets it, of old C or of C++: twice in a
 * file, in two files of one program (with SECOND it is the other), every warning
 * on. The program succeeds if both files agree with the library.
 */
#include <qkv/qkv.h>
#include <qkv/qkv.h>

#ifdef __cplusplus
extern "C" size_t other_size(void);
#else
size_t other_size(void);
#endif

#ifdef SECOND
size_t other_size(void)
{
    return sizeof(qkv_attention_desc);
}
#else
int main(void)
{
    /* The zero-initialised descriptor that every program starts from. */
    static qkv_attention_desc desc;
    desc.size = sizeof(desc);
    desc.head_dim = 1;
    return qkv_attention_supports(&desc, NULL) != QKV_OK || other_size() != desc.size ||
           qkv_version() != QKV_VERSION;
}
#endif
