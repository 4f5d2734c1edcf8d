/* yaml.h - the flat subset of YAML that a configuration is written in.
 *
 * The top is a mapping of scalar keys to scalars or lists of scalars; one key that the caller names may hold a
 * mapping of scalars, whose entries come out as "that_key.inner_key".  Everything else that YAML can say is refused with
 * its line: deeper nesting, anchors and aliases, tags, several documents, tabs as indentation, bytes that are not UTF-8
 * text.  Scalars stay text: what a value means is its key's business, so `no` and `3e-3` need no quotes.
 * Duplicate keys are the caller's to find, who knows which spellings are the same key. */
#ifndef FB_CONFIG_YAML_H
#define FB_CONFIG_YAML_H

#include "base/error.h"

typedef struct fb_yaml_entry {
    char    *key;
    char    *value; /* NULL: null, ~, nothing at all, or an empty list; a list's items are joined by commas */
    uint32_t line;  /* of the key, from 1 */
    bool     list;
} fb_yaml_entry;

typedef struct fb_yaml {
    fb_yaml_entry *entry;
    uint32_t       n, capacity;
} fb_yaml;

enum { FB_YAML_SIZE_MAX = 1 << 20, FB_PLACE_SIZE = 192 };

/* text: size bytes, read from path (only for messages; NULL: the command line).  nested_key: may be NULL.
 * FB_CONFIG or FB_NOMEM; *out is written on success only, and freed with fb_yaml_free. */
fb_status fb_yaml_parse(fb_yaml *out, const char *path, const char *text, uint64_t size, const char *nested_key, fb_error *err);
void      fb_yaml_free(fb_yaml *y);

/* Where something was said, for the start of a sentence: "train.yaml:7", or "command line" when path is NULL. */
const char *fb_place_str(char buf[FB_PLACE_SIZE], const char *path, uint32_t line);
/* Hostile text made fit for a sentence: at most some 60 bytes of it, cut between characters, without control characters. */
enum { FB_SHOWN_SIZE = 72 };
const char *fb_shown_str(char buf[FB_SHOWN_SIZE], const char *text);

#endif
