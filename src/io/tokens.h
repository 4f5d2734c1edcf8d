/* tokens.h - read a token shard (.fbt), the tokenized dataset that forebay.data writes.
 *
 * Layout (docs/FORMATS.md; all little-endian, every section 64-byte aligned):
 *   0   u8[8] magic "FBTOKENS"      8   u32 version = 1        12  u32 header_size = 128
 *   16  u64 n_token                 24  u64 n_doc              32  u64 n_learned
 *   40  u64 ids_offset   (u32[n_token])
 *   48  u64 label_offset (label_kind 0: u8[n_token], 1 = learned; label_kind 1: i32[n_token], -100 = not learned)
 *   56  u64 doc_offset   (u64[n_doc + 1], token index where each document starts; last = n_token)
 *   64  u64 meta_offset  72  u64 meta_size   (UTF-8 JSON: provenance, fingerprint)
 *   80  u64 file_size    88  u64 checksum    (XXH3-64 of bytes [header_size, file_size))
 *   96  u32 label_kind   100 u32 id_max      (largest token id in ids and labels)
 *   104 u32 doc_len_max  108 zero up to 128
 * A label belongs to its own position: the token at i is learned from the tokens before it in its document.  The
 * first token of a document can never be learned; writers clear its label, and n_learned does not count it.
 * The file is hostile input; everything is checked at open (the checksum too).
 * Lifetime: pointers die with close.  Threads: reads by any number. */
#ifndef FB_IO_TOKENS_H
#define FB_IO_TOKENS_H

#include "base/error.h"

typedef struct fb_tokens {
    uint64_t        n_token, n_doc, n_learned;
    uint32_t        id_max, doc_len_max;
    uint64_t        checksum;  /* of all that follows the header */
    const uint32_t *ids;       /* [n_token] */
    const uint8_t  *mask;      /* [n_token], or NULL when labels is given */
    const int32_t  *labels;    /* [n_token], or NULL when mask is given */
    const uint64_t *doc_start; /* [n_doc + 1] */
    const char     *meta;      /* meta_size bytes of JSON, not NUL-terminated */
    uint64_t        meta_size;
    void           *map;
    uint64_t        map_size;
} fb_tokens;

enum { FB_LABEL_NONE = -100 };

/* FB_INPUT with a sentence that names the path.  *out is filled on success only. */
fb_status fb_tokens_open(fb_tokens *out, const char *path, fb_error *err);
void      fb_tokens_close(fb_tokens *t); /* a zeroed struct is fine */

/* The token to be predicted at position i (an index into ids), FB_LABEL_NONE when it is not learned. */
static inline int32_t fb_tokens_label(const fb_tokens *t, uint64_t i)
{
    if (t->labels)
        return t->labels[i];
    return t->mask[i] ? (int32_t)t->ids[i] : FB_LABEL_NONE;
}

#endif
