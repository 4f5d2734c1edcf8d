#include "io/shard.h"

#include "io/file.h"
#include "io/sys.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <jansson.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

_Static_assert(__BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "safetensors data is little-endian, and is used as it is read");

/* The limit of the reference reader: a header that claims more is an attack, not a model. */
static const uint64_t header_size_max = 100 * 1000 * 1000;
enum { HALVES = 1 << 14 }; /* elements of 16 bits that are read at a time: they stay in the cache until they are converted */

struct fb_shard {
    char             *path;
    int               fd;
    uint64_t          size;     /* of the file, when it was opened */
    char             *text;     /* the header's JSON, while it is parsed */
    uint64_t          text_size;
    json_t           *header;   /* owns the names */
    fb_tensor        *tensors;  /* in order of data */
    const fb_tensor **by_name;  /* sorted */
    uint32_t          n_tensor;
};

#define BAD(s, ...) fb_fail_file(err, FB_INPUT, (s)->path, __VA_ARGS__)

/* How many of the bytes could be read; *why: the errno of what stopped it, 0 where the file ends. */
static uint64_t read_at(const fb_shard *s, void *out, uint64_t size, uint64_t offset, int *why)
{
    uint64_t got = 0;
    *why = 0;
    while (got < size) {
        ssize_t n = fb_sys_pread(s->fd, (char *)out + got, size - got, (off_t)(offset + got));
        if (n < 0 && errno == EINTR)
            continue;
        if (n < 0)
            *why = errno;
        if (n <= 0)
            break;
        got += (uint64_t)n;
    }
    return got;
}

static fb_status read_part(const fb_shard *s, void *out, uint64_t size, uint64_t offset, fb_error *err)
{
    int      why;
    uint64_t got = read_at(s, out, size, offset, &why);
    if (got < size)
        return BAD(s, "reading stopped at byte %llu: %s", (unsigned long long)(offset + got),
                   why ? strerror(why) : "the file became shorter");
    return FB_OK;
}

static fb_status read_header(fb_shard *s, fb_error *err)
{
    uint64_t  size;
    fb_status st = read_part(s, &size, sizeof size, 0, err);
    if (st != FB_OK)
        return st;
    if (size > header_size_max)
        return BAD(s, "claims a header of %llu bytes, at most %llu are read", (unsigned long long)size,
                   (unsigned long long)header_size_max);
    if (size > s->size - 8)
        return BAD(s, "claims a header of %llu bytes but holds only %llu after its length; it was truncated",
                   (unsigned long long)size, (unsigned long long)(s->size - 8));
    s->text = malloc(size + 1);
    if (!s->text)
        return fb_fail_file(err, FB_NOMEM, s->path, "no memory for a header of %llu bytes", (unsigned long long)size);
    s->text_size = size;
    s->text[size] = 0;
    return read_part(s, s->text, size, 8, err);
}

static fb_status shard_open(fb_shard *s, fb_error *err)
{
    struct stat info;
    s->fd = fb_sys_open(s->path, O_RDONLY | O_CLOEXEC | O_NONBLOCK, 0);
    if (s->fd < 0)
        return errno == ENOENT ? BAD(s, "there is no such file") : BAD(s, "cannot be opened: %s", strerror(errno));
    if (fstat(s->fd, &info) != 0)
        return BAD(s, "cannot be examined: %s", strerror(errno));
    if (!S_ISREG(info.st_mode))
        return BAD(s, "is %s, a safetensors file is needed", S_ISDIR(info.st_mode) ? "a folder" : "a device or pipe");
    if (info.st_size == 0)
        return BAD(s, "is empty, a safetensors file has at least 10 bytes");
    if (info.st_size < 10)
        return BAD(s, "is %lld bytes long, a safetensors file has at least 10", (long long)info.st_size);
    s->size = (uint64_t)info.st_size;
    /* Each byte is read once: the page cache is to give these up before anything that is used again. */
    posix_fadvise(s->fd, 0, 0, POSIX_FADV_NOREUSE);
    return read_header(s, err);
}

/* Every dtype of the format, so that "not for us" and "not in the format" read differently. */
static const char *const foreign_dtypes[] = { "BOOL", "U8", "I8", "U16", "U32", "I32", "U64", "I64", "F64", "C64",
                                              "F4", "F6_E2M3", "F6_E3M2", "F8_E5M2", "F8_E4M3", "F8_E8M0",
                                              "F8_E4M3FNUZ", "F8_E5M2FNUZ" };

static fb_status parse_dtype(const fb_shard *s, fb_tensor *t, const json_t *value, fb_error *err)
{
    const char *text = json_string_value(value);
    if (!text)
        return BAD(s, "tensor '%.96s' has no dtype; expected a string such as \"BF16\"", t->name);
    for (fb_dtype d = 0; d <= FB_I16; d++)
        if (strcmp(text, fb_dtype_str(d)) == 0) {
            t->dtype = d;
            return FB_OK;
        }
    for (size_t i = 0; i < FB_COUNT(foreign_dtypes); i++)
        if (strcmp(text, foreign_dtypes[i]) == 0)
            return BAD(s, "tensor '%.96s' is %s; forebay reads F32, F16 and BF16, so convert the checkpoint first", t->name,
                       text);
    return BAD(s, "tensor '%.96s' has the unknown dtype '%.32s'; expected F32, F16 or BF16", t->name, text);
}

/* Fills rank, shape and size. */
static fb_status parse_shape(const fb_shard *s, fb_tensor *t, const json_t *value, fb_error *err)
{
    if (!json_is_array(value))
        return BAD(s, "tensor '%.96s' has no shape; expected a list of integers", t->name);
    size_t rank = json_array_size(value);
    if (rank > FB_RANK_MAX)
        return BAD(s, "tensor '%.96s' has %zu dimensions, at most %d are read", t->name, rank, FB_RANK_MAX);
    t->rank = (uint32_t)rank;
    t->size = fb_dtype_size(t->dtype);
    for (size_t i = 0; i < rank; i++) {
        const json_t *dim = json_array_get(value, i);
        if (!json_is_integer(dim) || json_integer_value(dim) < 0)
            return BAD(s, "dimension %zu of tensor '%.96s' is not an integer of at least 0", i, t->name);
        t->shape[i] = (uint64_t)json_integer_value(dim);
        if (__builtin_mul_overflow(t->size, t->shape[i], &t->size))
            return BAD(s, "the shape of tensor '%.96s' multiplies to more bytes than 64 bits can count", t->name);
    }
    return FB_OK;
}

/* Fills offset; body is where data_offsets count from. */
static fb_status parse_range(const fb_shard *s, fb_tensor *t, const json_t *value, uint64_t body, fb_error *err)
{
    const json_t *first = json_array_get(value, 0), *last = json_array_get(value, 1);
    if (json_array_size(value) != 2 || !json_is_integer(first) || !json_is_integer(last) || json_integer_value(first) < 0 ||
        json_integer_value(last) < 0)
        return BAD(s, "the data_offsets of tensor '%.96s' are not two integers of at least 0", t->name);
    uint64_t begin = (uint64_t)json_integer_value(first), end = (uint64_t)json_integer_value(last);
    uint64_t body_size = s->size - body;
    if (begin > end)
        return BAD(s, "tensor '%.96s' ends at %llu, before its start at %llu", t->name, (unsigned long long)end,
                   (unsigned long long)begin);
    if (end > body_size)
        return BAD(s, "tensor '%.96s' ends at byte %llu of the data, the file holds %llu; it was truncated", t->name,
                   (unsigned long long)end, (unsigned long long)body_size);
    if (end - begin != t->size)
        return BAD(s, "tensor '%.96s' has %llu bytes of data, its dtype and shape need %llu", t->name,
                   (unsigned long long)(end - begin), (unsigned long long)t->size);
    t->offset = body + begin;
    return FB_OK;
}

static fb_status check_metadata(const fb_shard *s, json_t *metadata, fb_error *err)
{
    const char *key;
    json_t     *value;
    if (!json_is_object(metadata))
        return BAD(s, "__metadata__ is not an object");
    json_object_foreach(metadata, key, value)
        if (!json_is_string(value))
            return BAD(s, "__metadata__ key '%.96s' is not a string", key);
    return FB_OK;
}

static int compare_data(const void *a, const void *b)
{
    const fb_tensor *x = a, *y = b;
    if (x->offset != y->offset)
        return x->offset < y->offset ? -1 : 1;
    if (x->size != y->size) /* an empty tensor goes before the one that starts where it lies */
        return x->size < y->size ? -1 : 1;
    return strcmp(x->name, y->name);
}

static int compare_name(const void *a, const void *b)
{
    return strcmp((*(const fb_tensor *const *)a)->name, (*(const fb_tensor *const *)b)->name);
}

static int compare_key(const void *key, const void *item)
{
    return strcmp(key, (*(const fb_tensor *const *)item)->name);
}

/* The ranges must tile the data: the format forbids overlaps and holes. */
static fb_status check_tiling(const fb_shard *s, uint64_t body, fb_error *err)
{
    uint64_t expect = body;
    for (uint32_t i = 0; i < s->n_tensor; i++) {
        const fb_tensor *t = &s->tensors[i];
        if (t->offset < expect)
            return BAD(s, "tensors '%.96s' and '%.96s' overlap; each byte belongs to one tensor", s->tensors[i - 1].name,
                       t->name);
        if (t->offset > expect)
            return BAD(s, "%llu bytes before tensor '%.96s' belong to no tensor; the format allows no holes",
                       (unsigned long long)(t->offset - expect), t->name);
        expect = t->offset + t->size;
    }
    if (expect != s->size)
        return BAD(s, "%llu bytes at the end belong to no tensor; the format allows no holes",
                   (unsigned long long)(s->size - expect));
    return FB_OK;
}

static fb_status parse_json(fb_shard *s, fb_error *err)
{
    json_error_t why;
    const char  *text = s->text;
    s->header = json_loadb(text, s->text_size, JSON_REJECT_DUPLICATES, &why);
    if (!s->header && json_error_code(&why) == json_error_duplicate_key) {
        /* The parser stands just behind the second key. */
        size_t end = why.position > 1 ? (size_t)why.position - 1 : 0, start = end;
        while (start > 0 && text[start - 1] != '"')
            start--;
        return BAD(s, "'%.*s' stands twice in the header; names must be unique", (int)(end - start < 200 ? end - start : 200),
                   text + start);
    }
    if (!s->header)
        return BAD(s, "the header is not JSON: %.120s (byte %d)", why.text, why.position);
    if (!json_is_object(s->header))
        return BAD(s, "the header is not a JSON object of tensors");
    if (text[0] != '{')
        return BAD(s, "the header does not begin with '{', as the format demands");
    return FB_OK;
}

static fb_status shard_parse(fb_shard *s, fb_error *err)
{
    fb_status st = parse_json(s, err);
    if (st != FB_OK)
        return st;

    size_t n = json_object_size(s->header); /* under header_size_max, so it fits 32 bits */
    s->tensors = calloc(n + 1, sizeof *s->tensors);
    s->by_name = calloc(n + 1, sizeof *s->by_name);
    if (!s->tensors || !s->by_name)
        return fb_fail_file(err, FB_NOMEM, s->path, "no memory for a table of %zu tensors", n);

    const char *name;
    json_t     *entry;
    uint64_t    body = 8 + s->text_size;
    json_object_foreach(s->header, name, entry) {
        if (strcmp(name, "__metadata__") == 0) {
            FB_TRY(check_metadata(s, entry, err));
            continue;
        }
        fb_tensor *t = &s->tensors[s->n_tensor];
        t->shard = s;
        t->name = name;
        if (!json_is_object(entry))
            return BAD(s, "the entry of tensor '%.96s' is not an object with dtype, shape and data_offsets", name);
        FB_TRY(parse_dtype(s, t, json_object_get(entry, "dtype"), err));
        FB_TRY(parse_shape(s, t, json_object_get(entry, "shape"), err));
        FB_TRY(parse_range(s, t, json_object_get(entry, "data_offsets"), body, err));
        s->n_tensor++;
    }
    qsort(s->tensors, s->n_tensor, sizeof *s->tensors, compare_data);
    FB_TRY(check_tiling(s, body, err));
    for (uint32_t i = 0; i < s->n_tensor; i++)
        s->by_name[i] = &s->tensors[i];
    qsort(s->by_name, s->n_tensor, sizeof *s->by_name, compare_name);
done:
    return st;
}

fb_status fb_shard_open(fb_shard **out, const char *path, fb_error *err)
{
    fb_status st = FB_OK;
    fb_shard *s = calloc(1, sizeof *s);
    if (!s || !(s->path = strdup(path))) {
        free(s);
        return fb_fail_file(err, FB_NOMEM, path, "no memory for a shard handle");
    }
    FB_TRY(shard_open(s, err));
    FB_TRY(shard_parse(s, err));
    free(s->text);
    s->text = NULL;
    *out = s;
    s = NULL;
done:
    fb_shard_close(s);
    return st;
}

void fb_shard_close(fb_shard *s)
{
    if (!s)
        return;
    if (s->fd >= 0)
        close(s->fd);
    json_decref(s->header);
    free(s->text);
    free(s->tensors);
    free(s->by_name);
    free(s->path);
    free(s);
}

/* ---- data ---- */

/* What is left of a tensor does not depend on which of its readers was the first to miss a byte. */
static fb_status became_shorter(const fb_tensor *t, fb_error *err)
{
    struct stat info;
    uint64_t    size = fstat(t->shard->fd, &info) == 0 ? (uint64_t)info.st_size : 0;
    uint64_t    left = size < t->offset ? 0 : size - t->offset < t->size ? size - t->offset : t->size;
    return fb_fail_file(err, FB_IO, t->shard->path, "became shorter while it was being read: '%.96s' has %llu bytes, %llu of them "
                        "are left; put the file back and start again", t->name, (unsigned long long)t->size,
                        (unsigned long long)left);
}

fb_status fb_tensor_read(const fb_tensor *t, uint64_t first, uint64_t n, void *out, fb_error *err)
{
    uint64_t width = fb_dtype_size(t->dtype), at = t->offset + first * width;
    int      why;
    assert(first * width + n * width <= t->size);
    uint64_t got = read_at(t->shard, out, n * width, at, &why);
    if (got == n * width)
        return FB_OK;
    if (!why)
        return became_shorter(t, err);
    return fb_fail_file(err, FB_IO, t->shard->path, "cannot be read at byte %llu, in '%.96s': %s", (unsigned long long)(at + got),
                        t->name, strerror(why));
}

fb_status fb_tensor_read_f32(const fb_tensor *t, uint64_t first, uint64_t n, float *out, fb_error *err)
{
    fb_status st = FB_OK;
    uint16_t  half[HALVES];
    if (t->dtype == FB_F32)
        return fb_tensor_read(t, first, n, out, err);
    for (uint64_t i = 0, k; i < n && st == FB_OK; i += k) {
        k = n - i < HALVES ? n - i : HALVES;
        st = fb_tensor_read(t, first + i, k, half, err);
        if (st == FB_OK)
            fb_to_f32(out + i, half, t->dtype, k);
    }
    return st;
}

/* ---- the table ---- */

const fb_tensor *fb_shard_find(const fb_shard *s, const char *name)
{
    const fb_tensor *const *found = bsearch(name, s->by_name, s->n_tensor, sizeof *s->by_name, compare_key);
    return found ? *found : NULL;
}

uint32_t fb_shard_count(const fb_shard *s)
{
    return s->n_tensor;
}

const fb_tensor *fb_shard_at(const fb_shard *s, uint32_t i)
{
    return i < s->n_tensor ? &s->tensors[i] : NULL;
}

const char *fb_shard_path(const fb_shard *s)
{
    return s->path;
}

const char *fb_shard_metadata(const fb_shard *s, const char *key)
{
    return json_string_value(json_object_get(json_object_get(s->header, "__metadata__"), key));
}
