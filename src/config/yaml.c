#include "config/yaml.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <yaml.h>

/* The event interface, not libyaml's document tree: an event is judged before anything is built from it, so that no
 * input makes us hold more than its own size, and aliases never expand. */
typedef struct reader {
    yaml_parser_t parser;
    yaml_event_t  event; /* the current one */
    fb_yaml       out;
    const char   *path, *text;
    uint64_t      size;
    fb_error     *err;
} reader;

const char *fb_place_str(char buf[FB_PLACE_SIZE], const char *path, uint32_t line)
{
    enum { TAIL = FB_PLACE_SIZE - 32 };
    if (!path) {
        snprintf(buf, FB_PLACE_SIZE, "command line");
        return buf;
    }
    size_t length = strlen(path);
    bool   cut = length > TAIL;
    snprintf(buf, FB_PLACE_SIZE, "%s%s:%u", cut ? "..." : "", cut ? path + length - TAIL : path, line);
    return buf;
}

const char *fb_shown_str(char buf[FB_SHOWN_SIZE], const char *text)
{
    enum { MAX = FB_SHOWN_SIZE - 12 };
    size_t n = strlen(text), keep = n;
    if (n > MAX)
        for (keep = MAX; keep > 0 && ((unsigned char)text[keep] & 0xc0) == 0x80; keep--)
            ; /* not into the middle of a UTF-8 character */
    for (size_t i = 0; i < keep; i++)
        buf[i] = (unsigned char)text[i] < 0x20 || text[i] == 0x7f ? '?' : text[i];
    memcpy(buf + keep, n > keep ? "..." : "", n > keep ? 4 : 1);
    return buf;
}

static fb_status fail_at(reader *r, uint32_t line, const char *fmt, ...) FB_PRINTF(3, 4);
static fb_status fail_at(reader *r, uint32_t line, const char *fmt, ...)
{
    char    place[FB_PLACE_SIZE], sentence[256];
    va_list ap;
    va_start(ap, fmt);
    vsnprintf(sentence, sizeof sentence, fmt, ap);
    va_end(ap);
    return fb_fail(r->err, FB_CONFIG, "%s: %s", fb_place_str(place, r->path, line), sentence);
}

static fb_status fail_memory(reader *r)
{
    return fb_fail(r->err, FB_NOMEM, "no memory to read the configuration");
}

static uint32_t line_of_offset(const reader *r, uint64_t offset)
{
    uint32_t line = 1;
    for (uint64_t i = 0; i < offset && i < r->size; i++)
        line += r->text[i] == '\n';
    return line;
}

static uint32_t event_line(const reader *r)
{
    return (uint32_t)r->event.start_mark.line + 1;
}

static fb_status next(reader *r)
{
    yaml_event_delete(&r->event);
    if (yaml_parser_parse(&r->parser, &r->event))
        return FB_OK;
    const yaml_parser_t *p = &r->parser;
    switch (p->error) {
    case YAML_MEMORY_ERROR:
        return fail_memory(r);
    case YAML_READER_ERROR: /* bytes that are not text: only an offset is known */
        return fail_at(r, line_of_offset(r, p->problem_offset), "not UTF-8 text: %s", p->problem);
    default:
        return fail_at(r, (uint32_t)p->problem_mark.line + 1, "not valid YAML: %s%s%s", p->problem,
                       p->context ? " " : "", p->context ? p->context : "");
    }
}

/* What no event may carry. */
static fb_status refuse_extras(reader *r)
{
    const yaml_char_t *anchor = NULL, *tag = NULL;
    switch (r->event.type) {
    case YAML_ALIAS_EVENT:
        return fail_at(r, event_line(r), "YAML aliases (*name) are not supported; write the value out");
    case YAML_SCALAR_EVENT:
        anchor = r->event.data.scalar.anchor;
        tag = r->event.data.scalar.tag;
        break;
    case YAML_SEQUENCE_START_EVENT:
        anchor = r->event.data.sequence_start.anchor;
        tag = r->event.data.sequence_start.tag;
        break;
    case YAML_MAPPING_START_EVENT:
        anchor = r->event.data.mapping_start.anchor;
        tag = r->event.data.mapping_start.tag;
        break;
    default:
        break;
    }
    if (anchor)
        return fail_at(r, event_line(r), "YAML anchors (&name) are not supported; write the value out where it is used");
    if (tag)
        return fail_at(r, event_line(r), "YAML tags (!name) are not supported; write the plain value");
    return FB_OK;
}

/* The current scalar as an owned string; *out is NULL for null. */
static fb_status take_scalar(reader *r, char **out)
{
    const char *value = (const char *)r->event.data.scalar.value;
    size_t      length = r->event.data.scalar.length;
    *out = NULL;
    if (memchr(value, 0, length))
        return fail_at(r, event_line(r), "a NUL character is not allowed in a value");
    if (r->event.data.scalar.style == YAML_PLAIN_SCALAR_STYLE &&
        (length == 0 || !strcmp(value, "~") || !strcmp(value, "null") || !strcmp(value, "Null") || !strcmp(value, "NULL")))
        return FB_OK;
    *out = strdup(value);
    return *out ? FB_OK : fail_memory(r);
}

/* The items of the current list, up to its end, joined by commas. */
static fb_status take_list(reader *r, char **out)
{
    fb_status st = FB_OK;
    char     *joined = NULL, *item = NULL;
    size_t    length = 0;
    *out = NULL;
    for (;;) {
        FB_TRY(next(r));
        if (r->event.type == YAML_SEQUENCE_END_EVENT)
            break;
        FB_TRY(refuse_extras(r));
        if (r->event.type != YAML_SCALAR_EVENT) {
            st = fail_at(r, event_line(r), "a list may hold plain values only, not lists or mappings");
            goto done;
        }
        FB_TRY(take_scalar(r, &item));
        if (!item || !*item || strchr(item, ',')) {
            st = fail_at(r, event_line(r), "a list item may not be %s", item && *item ? "text with a comma in it" : "empty");
            goto done;
        }
        size_t n = strlen(item);
        char  *longer = realloc(joined, length + n + 2);
        if (!longer) {
            st = fail_memory(r);
            goto done;
        }
        joined = longer;
        if (length)
            joined[length++] = ',';
        memcpy(joined + length, item, n + 1);
        length += n;
        free(item);
        item = NULL;
    }
    *out = joined;
    joined = NULL;
done:
    free(item);
    free(joined);
    return st;
}

/* A new last entry whose key is "prefix.key", or just the key. */
static fb_status add_entry(reader *r, const char *prefix, fb_yaml_entry **out)
{
    fb_yaml *y = &r->out;
    if (y->n == y->capacity) {
        uint32_t       capacity = y->capacity ? 2 * y->capacity : 64;
        fb_yaml_entry *more = realloc(y->entry, capacity * sizeof *more);
        if (!more)
            return fail_memory(r);
        y->entry = more;
        y->capacity = capacity;
    }
    fb_yaml_entry e = { .line = event_line(r) };
    const char   *key = (const char *)r->event.data.scalar.value;
    if (memchr(key, 0, r->event.data.scalar.length))
        return fail_at(r, e.line, "a NUL character is not allowed in a key");
    if (asprintf(&e.key, "%s%s%s", prefix ? prefix : "", prefix ? "." : "", key) < 0)
        return fail_memory(r);
    y->entry[y->n] = e;
    *out = &y->entry[y->n++];
    return FB_OK;
}

/* The current mapping, up to its end.  At the top, nested_key may hold another one. */
static fb_status take_mapping(reader *r, const char *prefix, const char *nested_key)
{
    fb_status st = FB_OK;
    for (;;) {
        FB_TRY(next(r));
        if (r->event.type == YAML_MAPPING_END_EVENT)
            return FB_OK;
        FB_TRY(refuse_extras(r));
        if (r->event.type != YAML_SCALAR_EVENT)
            return fail_at(r, event_line(r), "a key must be a name, not a list or a mapping");
        fb_yaml_entry *e = NULL;
        FB_TRY(add_entry(r, prefix, &e));

        FB_TRY(next(r));
        FB_TRY(refuse_extras(r));
        switch (r->event.type) {
        case YAML_SCALAR_EVENT:
            FB_TRY(take_scalar(r, &e->value));
            break;
        case YAML_SEQUENCE_START_EVENT:
            e->list = true;
            FB_TRY(take_list(r, &e->value));
            break;
        default: {
            char shown[FB_SHOWN_SIZE];
            fb_shown_str(shown, e->key);
            if (prefix || !nested_key || strcmp(e->key, nested_key) != 0)
                return fail_at(r, event_line(r), "'%s' holds a mapping; it takes one value%s", shown,
                               prefix ? "" : " (the configuration is flat)");
            free(e->key); /* its inner keys stand for it; even {} says nothing more than null */
            r->out.n--;
            FB_TRY(take_mapping(r, nested_key, NULL));
        }
        }
    }
done:
    return st;
}

static fb_status take_stream(reader *r, const char *nested_key)
{
    fb_status st = FB_OK;
    FB_TRY(next(r)); /* stream start */
    FB_TRY(next(r));
    if (r->event.type == YAML_STREAM_END_EVENT)
        return FB_OK; /* nothing, or only comments */
    FB_TRY(next(r));
    FB_TRY(refuse_extras(r));
    if (r->event.type == YAML_MAPPING_START_EVENT) {
        FB_TRY(take_mapping(r, NULL, nested_key));
    } else {
        return fail_at(r, event_line(r), "expected lines of the form `key: value`, found %s",
                       r->event.type == YAML_SEQUENCE_START_EVENT ? "a list" : "a lone value");
    }
    FB_TRY(next(r)); /* document end */
    FB_TRY(next(r));
    if (r->event.type != YAML_STREAM_END_EVENT)
        return fail_at(r, event_line(r), "a second YAML document begins here; a configuration is one document");
done:
    return st;
}

/* YAML forbids tabs as indentation, but a scanner's words about it name what it tripped over, not the tab. */
static fb_status refuse_tabs(reader *r)
{
    bool     leading = true;
    uint32_t line = 1;
    for (uint64_t i = 0; i < r->size; i++) {
        char c = r->text[i];
        if (leading && c == '\t')
            return fail_at(r, line, "a tab is used as indentation; YAML wants spaces");
        leading = c == '\n' || (leading && c == ' ');
        line += c == '\n';
    }
    return FB_OK;
}

fb_status fb_yaml_parse(fb_yaml *out, const char *path, const char *text, uint64_t size, const char *nested_key, fb_error *err)
{
    fb_status st = FB_OK;
    if (size >= 3 && !memcmp(text, "\xef\xbb\xbf", 3)) { /* a byte order mark, which only says that this is UTF-8 */
        text += 3;
        size -= 3;
    }
    reader r = { .path = path, .text = text, .size = size, .err = err };
    if (size > FB_YAML_SIZE_MAX)
        return fail_at(&r, line_of_offset(&r, FB_YAML_SIZE_MAX), "the file goes on past 1 MiB; this is no configuration");
    if (!yaml_parser_initialize(&r.parser))
        return fail_memory(&r);
    yaml_parser_set_encoding(&r.parser, YAML_UTF8_ENCODING); /* else a stray mark would make it UTF-16 */
    yaml_parser_set_input_string(&r.parser, (const unsigned char *)text, size);
    FB_TRY(refuse_tabs(&r));
    FB_TRY(take_stream(&r, nested_key));
    *out = r.out;
    r.out = (fb_yaml){ 0 };
done:
    yaml_event_delete(&r.event);
    yaml_parser_delete(&r.parser);
    fb_yaml_free(&r.out);
    return st;
}

void fb_yaml_free(fb_yaml *y)
{
    for (uint32_t i = 0; i < y->n; i++) {
        free(y->entry[i].key);
        free(y->entry[i].value);
    }
    free(y->entry);
    *y = (fb_yaml){ 0 };
}
