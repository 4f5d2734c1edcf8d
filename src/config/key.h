/* key.h - the table of configuration keys, and what one key can do by itself: take a value, say what it takes, be shown.
 *
 * Everything about a key is its row in key.c; options.c reads whole configurations with it. */
#ifndef FB_CONFIG_KEY_H
#define FB_CONFIG_KEY_H

#include "config/options.h"

#include <jansson.h>
#include <stddef.h>

typedef struct fb_choice {
    const char *name; /* NULL ends a list; a trailing * stands for one or more characters, in text keys only */
    int         value;
} fb_choice;

typedef enum {
    FB_KIND_BOOL, FB_KIND_U32, FB_KIND_U64, FB_KIND_I64, FB_KIND_REAL, FB_KIND_SIZE, FB_KIND_CHOICE, FB_KIND_TEXT, FB_KIND_COUNT
} fb_kind;

enum {
    FB_KEY_BELOW = 1,     /* a number: the high end itself is out */
    FB_KEY_AUTO = 2,      /* takes `auto`, stored as FB_AUTO */
    FB_KEY_ALL = 4,       /* takes `all`, stored as FB_SLOTS_ALL */
    FB_KEY_LIST = 8,      /* takes a list, joined by commas */
    FB_KEY_SWITCH = 16,   /* text, where a bool is normalised to true or false */
    FB_KEY_MAY_EMPTY = 32, /* text, where an empty one is not the same as none */
    FB_KEY_AUTO_MOST = 64  /* a size: takes `auto`, stored as FB_SIZE_MOST, because 0 is a size too */
};

typedef struct fb_key {
    const char      *name;
    fb_kind          kind;
    size_t           offset;
    const char      *fallback; /* the default, as a user would write it; NULL: not given (text NULL, REAL -1, others 0) */
    const char      *help;     /* one line; ends the sentence about a bad value too */
    double           lo, hi;
    const fb_choice *choice;
    unsigned         flags;
    unsigned         schedules; /* an lr_scheduler_kwargs key: bit 1 << fb_lr_type for each schedule that takes it */
} fb_key;

enum { FB_KEY_COUNT = 67, FB_EXPECTATION_SIZE = 256 };
extern const fb_key fb_key_table[]; /* FB_KEY_COUNT rows */

static inline void *fb_key_field(const fb_options *o, const fb_key *k)
{
    return (char *)o + k->offset;
}

/* By name or other spelling; NULL when there is none. */
const fb_key *fb_key_find(const char *name);
/* The known name that was probably meant, NULL when none is near; kwargs: only among lr_scheduler_kwargs keys. */
const char   *fb_key_nearest(const char *name, bool kwargs);
/* FB_CONFIG: the key does not take this text; no sentence, because only the caller knows the place.  FB_NOMEM. */
fb_status     fb_key_set(fb_options *o, const fb_key *k, const char *text);
fb_status     fb_key_set_default(fb_options *o, const fb_key *k); /* FB_NOMEM */
/* What the key takes, to stand after "must be". */
const char   *fb_key_expectation(char buf[FB_EXPECTATION_SIZE], const fb_key *k);
const char   *fb_key_kind_str(const fb_key *k);
/* null stands for what is not given or what the schedule does not take, so that reading all values back, as the flow
 * mapping that JSON is in YAML, gives the same options. */
json_t       *fb_key_json(const fb_options *o, const fb_key *k);

#endif
