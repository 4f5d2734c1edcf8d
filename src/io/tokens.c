#include "io/tokens.h"

#include "io/file.h"
#include "io/sys.h"

#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "token shards are little-endian, and are used in place");

enum { HEADER_SIZE = 128, SECTION_ALIGN = 64, META_SIZE_MAX = 64 << 20, LABEL_MASK = 0, LABEL_IDS = 1 };

typedef struct header {
    char     magic[8];
    uint32_t version, header_size;
    uint64_t n_token, n_doc, n_learned;
    uint64_t ids_offset, label_offset, doc_offset, meta_offset, meta_size;
    uint64_t file_size, checksum;
    uint32_t label_kind, id_max, doc_len_max;
    uint8_t  reserved[20];
} header;

_Static_assert(sizeof(header) == HEADER_SIZE, "the header's layout is the file's");

typedef unsigned long long ull;

#define BAD(...) fb_fail_file(err, FB_INPUT, path, __VA_ARGS__)

static fb_status map_file(fb_tokens *t, const char *path, fb_error *err)
{
    struct stat info;
    int         fd = fb_sys_open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK, 0);
    if (fd < 0)
        return errno == ENOENT ? BAD("there is no such file") : BAD("cannot be opened: %s", strerror(errno));
    fb_status st = FB_OK;
    if (fstat(fd, &info) != 0)
        st = BAD("cannot be examined: %s", strerror(errno));
    else if (!S_ISREG(info.st_mode))
        st = BAD("is %s, a token shard is needed", S_ISDIR(info.st_mode) ? "a folder" : "a device or pipe");
    else if (info.st_size < HEADER_SIZE)
        st = BAD("is %lld bytes long, a token shard has at least %d", (long long)info.st_size, HEADER_SIZE);
    else {
        t->map_size = (uint64_t)info.st_size;
        t->map = fb_sys_map(fd, t->map_size);
        if (t->map == MAP_FAILED) {
            t->map = NULL;
            st = BAD("cannot be mapped: %s", strerror(errno));
        }
    }
    close(fd);
    return st;
}

static fb_status check_header(const header *h, uint64_t file_size, const char *path, fb_error *err)
{
    if (memcmp(h->magic, "FBTOKENS", sizeof h->magic) != 0)
        return BAD("does not begin with FBTOKENS; it is not a token shard");
    if (h->version != 1)
        return BAD("has version %u, this build reads version 1; make the shard again with `forebay data`", h->version);
    if (h->header_size != HEADER_SIZE)
        return BAD("claims a header of %u bytes, version 1 has %d", h->header_size, HEADER_SIZE);
    if (h->file_size != file_size)
        return BAD("was written with %llu bytes and now has %llu; make it again", (ull)h->file_size, (ull)file_size);
    if (h->label_kind != LABEL_MASK && h->label_kind != LABEL_IDS)
        return BAD("has label kind %u; expected 0 (mask) or 1 (ids)", h->label_kind);
    if (h->id_max > INT32_MAX)
        return BAD("has a largest id of %u, ids end at %d", h->id_max, INT32_MAX);
    if (h->meta_size > META_SIZE_MAX)
        return BAD("has %llu bytes of metadata, at most %d are read", (ull)h->meta_size, META_SIZE_MAX);
    for (size_t i = 0; i < sizeof h->reserved; i++)
        if (h->reserved[i])
            return BAD("has a reserved header byte (%zu) that is not zero", offsetof(header, reserved) + i);
    return FB_OK;
}

typedef struct section {
    const char *name;
    uint64_t    offset, count, element;
} section;

/* Each section is aligned, lies behind the header and in the file, and shares no byte with another. */
static fb_status check_sections(const header *h, const char *path, fb_error *err)
{
    if (h->n_doc == UINT64_MAX)
        return BAD("claims %llu documents", (ull)h->n_doc);
    const section sections[] = {
        { "ids", h->ids_offset, h->n_token, 4 },
        { "labels", h->label_offset, h->n_token, h->label_kind == LABEL_IDS ? 4 : 1 },
        { "documents", h->doc_offset, h->n_doc + 1, 8 },
        { "metadata", h->meta_offset, h->meta_size, 1 },
    };
    uint64_t ends[FB_COUNT(sections)];
    for (size_t i = 0; i < FB_COUNT(sections); i++) {
        const section *s = &sections[i];
        if (s->offset % SECTION_ALIGN != 0)
            return BAD("section %s starts at byte %llu, not at a multiple of %d", s->name, (ull)s->offset, SECTION_ALIGN);
        if (s->offset < HEADER_SIZE)
            return BAD("section %s starts at byte %llu, inside the header", s->name, (ull)s->offset);
        uint64_t size;
        if (__builtin_mul_overflow(s->count, s->element, &size) || __builtin_add_overflow(s->offset, size, &ends[i]) ||
            ends[i] > h->file_size)
            return BAD("section %s (%llu entries at byte %llu) passes the file's end at %llu", s->name, (ull)s->count,
                       (ull)s->offset, (ull)h->file_size);
        for (size_t k = 0; k < i; k++)
            if (s->offset < ends[k] && sections[k].offset < ends[i])
                return BAD("sections %s and %s overlap", sections[k].name, s->name);
    }
    return FB_OK;
}

static fb_status check_documents(const fb_tokens *t, const char *path, fb_error *err)
{
    uint64_t longest = 0;
    if (t->doc_start[0] != 0)
        return BAD("its first document starts at token %llu, not at 0", (ull)t->doc_start[0]);
    for (uint64_t d = 0; d < t->n_doc; d++) {
        if (t->doc_start[d + 1] <= t->doc_start[d])
            return BAD("document %llu starts at token %llu and ends at %llu; starts must rise", (ull)d, (ull)t->doc_start[d],
                       (ull)t->doc_start[d + 1]);
        uint64_t length = t->doc_start[d + 1] - t->doc_start[d];
        longest = length > longest ? length : longest;
    }
    if (t->doc_start[t->n_doc] != t->n_token)
        return BAD("its documents end at token %llu of %llu", (ull)t->doc_start[t->n_doc], (ull)t->n_token);
    if (longest != t->doc_len_max)
        return BAD("its longest document has %llu tokens, the header says %u", (ull)longest, t->doc_len_max);
    return FB_OK;
}

static fb_status check_tokens(const fb_tokens *t, const char *path, fb_error *err)
{
    uint64_t learned = 0;
    for (uint64_t i = 0; i < t->n_token; i++) {
        if (t->ids[i] > t->id_max)
            return BAD("token %llu has id %u, the header's largest is %u", (ull)i, t->ids[i], t->id_max);
        if (t->mask && t->mask[i] > 1)
            return BAD("token %llu has label mask %u; expected 0 or 1", (ull)i, t->mask[i]);
        if (t->labels && t->labels[i] != FB_LABEL_NONE && (t->labels[i] < 0 || (uint32_t)t->labels[i] > t->id_max))
            return BAD("token %llu has label %d; expected %d or 0 to %u", (ull)i, t->labels[i], FB_LABEL_NONE, t->id_max);
        learned += fb_tokens_label(t, i) != FB_LABEL_NONE;
    }
    for (uint64_t d = 0; d < t->n_doc; d++)
        if (fb_tokens_label(t, t->doc_start[d]) != FB_LABEL_NONE)
            return BAD("the first token of document %llu is marked as learned, but nothing comes before it", (ull)d);
    if (learned != t->n_learned)
        return BAD("%llu tokens are learned, the header says %llu", (ull)learned, (ull)t->n_learned);
    return FB_OK;
}

static fb_status check_meta(const fb_tokens *t, const char *path, fb_error *err)
{
    json_error_t why;
    json_t      *meta = json_loadb(t->meta, t->meta_size, JSON_REJECT_DUPLICATES, &why);
    fb_status    st = FB_OK;
    if (!json_is_object(meta))
        st = BAD("its metadata is not a JSON object: %.120s", meta ? "it is a list" : why.text);
    json_decref(meta);
    return st;
}

fb_status fb_tokens_open(fb_tokens *out, const char *path, fb_error *err)
{
    fb_tokens t = { 0 };
    fb_status st = FB_OK;
    FB_TRY(map_file(&t, path, err));

    const unsigned char *base = t.map;
    header               h;
    memcpy(&h, base, sizeof h);
    FB_TRY(check_header(&h, t.map_size, path, err));
    FB_TRY(check_sections(&h, path, err));
    if (XXH3_64bits(base + HEADER_SIZE, t.map_size - HEADER_SIZE) != h.checksum) {
        st = BAD("the checksum does not match: the file is damaged; make it again with `forebay data`");
        goto done;
    }
    t.n_token = h.n_token;
    t.n_doc = h.n_doc;
    t.n_learned = h.n_learned;
    t.id_max = h.id_max;
    t.doc_len_max = h.doc_len_max;
    t.checksum = h.checksum;
    t.ids = (const uint32_t *)(base + h.ids_offset);
    if (h.label_kind == LABEL_MASK)
        t.mask = base + h.label_offset;
    else
        t.labels = (const int32_t *)(base + h.label_offset);
    t.doc_start = (const uint64_t *)(base + h.doc_offset);
    t.meta = (const char *)(base + h.meta_offset);
    t.meta_size = h.meta_size;
    FB_TRY(check_documents(&t, path, err));
    FB_TRY(check_tokens(&t, path, err));
    FB_TRY(check_meta(&t, path, err));
    *out = t;
    t.map = NULL;
done:
    fb_tokens_close(&t);
    return st;
}

void fb_tokens_close(fb_tokens *t)
{
    if (t->map)
        munmap(t->map, t->map_size);
    *t = (fb_tokens){ 0 };
}
