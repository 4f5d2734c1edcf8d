#include "io/shard.h"

#include "io/file.h"

#include <jansson.h>
#include <stdlib.h>

static const uint64_t index_size_max = 100 * 1000 * 1000;
static const char single_name[] = "model.safetensors", index_name[] = "model.safetensors.index.json";

struct fb_shard_set {
    fb_shard        **shards;
    uint32_t          n_shard, n_tensor;
    const fb_tensor **by_name; /* sorted */
};

static int compare_name(const void *a, const void *b)
{
    return strcmp((*(const fb_tensor *const *)a)->name, (*(const fb_tensor *const *)b)->name);
}

static int compare_key(const void *key, const void *item)
{
    return strcmp(key, (*(const fb_tensor *const *)item)->name);
}

static int compare_text(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

static fb_status check_inside(const char *index, const char *dir, const char *file, fb_error *err)
{
    bool inside;
    if (strchr(file, '/') || strcmp(file, ".") == 0 || strcmp(file, "..") == 0 || !*file)
        return fb_fail_file(err, FB_INPUT, index, "names the file '%.120s'; expected the plain name of a file in its folder",
                            file);
    char     *real = fb_file_resolve(dir, file, &inside);
    fb_status st = FB_OK;
    if (!real)
        st = fb_fail_file(err, FB_INPUT, index, "names the file '%.120s', which is not in its folder; fetch it again", file);
    else if (!inside)
        st = fb_fail_file(err, FB_INPUT, index, "names '%.120s', a link that leads out of the folder, to %.160s", file, real);
    free(real);
    return st;
}

static fb_status set_open_shard(fb_shard_set *s, const char *dir, const char *file, fb_error *err)
{
    char      path[FB_PATH_SIZE];
    fb_status st = fb_path_join(path, sizeof path, dir, file, err);
    if (st == FB_OK)
        st = fb_shard_open(&s->shards[s->n_shard], path, err);
    if (st != FB_OK)
        return st;
    const fb_shard *shard = s->shards[s->n_shard++];
    s->n_tensor += fb_shard_count(shard);
    for (uint32_t i = 0; i < fb_shard_count(shard); i++)
        if (fb_shard_at(shard, i)->dtype == FB_I16)
            return fb_fail_file(err, FB_INPUT, path, "tensor '%.96s' is I16; weights are F32, F16 or BF16, so convert the "
                                "checkpoint first", fb_shard_at(shard, i)->name);
    return FB_OK;
}

/* Reads the index and gives its weight_map; *root owns it. */
static fb_status read_index(json_t **root, json_t **map, const char *index, fb_error *err)
{
    char        *text = NULL;
    uint64_t     size;
    json_error_t why;
    const char  *name;
    json_t      *file;
    fb_status    st = fb_file_read(&text, &size, index, index_size_max, err);
    if (st != FB_OK)
        return st;
    *root = json_loadb(text, size, JSON_REJECT_DUPLICATES, &why);
    free(text);
    if (!*root)
        return fb_fail_file(err, FB_INPUT, index, "is not JSON with unique keys: %.120s (line %d)", why.text, why.line);
    *map = json_object_get(*root, "weight_map");
    if (!json_is_object(*map) || json_object_size(*map) == 0)
        return fb_fail_file(err, FB_INPUT, index, "has no weight_map; expected an object of tensor names and file names");
    json_object_foreach(*map, name, file)
        if (!json_is_string(file))
            return fb_fail_file(err, FB_INPUT, index, "maps '%.96s' to something that is not a file name", name);
    return FB_OK;
}

/* Opens each distinct file once, in order of names. */
static fb_status open_mapped(fb_shard_set *s, const char *dir, const char *index, json_t *map, fb_error *err)
{
    fb_status    st = FB_OK;
    size_t       n = 0;
    const char **files = calloc(json_object_size(map), sizeof *files), *name;
    json_t      *file;
    if (!files)
        return fb_fail_file(err, FB_NOMEM, index, "no memory for its file names");
    json_object_foreach(map, name, file)
        files[n++] = json_string_value(file);
    qsort(files, n, sizeof *files, compare_text);
    size_t distinct = 0;
    for (size_t i = 0; i < n; i++)
        if (i == 0 || strcmp(files[i], files[distinct - 1]) != 0)
            files[distinct++] = files[i];
    s->shards = calloc(distinct, sizeof *s->shards);
    if (!s->shards) {
        st = fb_fail_file(err, FB_NOMEM, index, "no memory for %zu shards", distinct);
        goto done;
    }
    for (size_t i = 0; i < distinct; i++) {
        FB_TRY(check_inside(index, dir, files[i], err));
        FB_TRY(set_open_shard(s, dir, files[i], err));
    }
done:
    free(files);
    return st;
}

/* Index and files must say the same: every tensor of the one is in the other, at the same place. */
static fb_status check_mapped(const fb_shard_set *s, const char *index, json_t *map, fb_error *err)
{
    const char *name;
    json_t     *file;
    for (uint32_t k = 0; k < s->n_shard; k++)
        for (uint32_t i = 0; i < fb_shard_count(s->shards[k]); i++) {
            const char *holder = base_name(fb_shard_path(s->shards[k]));
            const char *tensor = fb_shard_at(s->shards[k], i)->name;
            const char *place = json_string_value(json_object_get(map, tensor));
            if (!place)
                return fb_fail_file(err, FB_INPUT, index, "does not name the tensor '%.96s' that %.96s holds", tensor, holder);
            if (strcmp(place, holder) != 0)
                return fb_fail_file(err, FB_INPUT, index, "places '%.96s' in %.96s, but %.96s holds it", tensor, place, holder);
        }
    json_object_foreach(map, name, file) {
        bool found = false;
        for (uint32_t k = 0; k < s->n_shard && !found; k++)
            found = strcmp(base_name(fb_shard_path(s->shards[k])), json_string_value(file)) == 0 &&
                    fb_shard_find(s->shards[k], name);
        if (!found)
            return fb_fail_file(err, FB_INPUT, index, "places '%.96s' in %.96s, which lacks it", name, json_string_value(file));
    }
    return FB_OK;
}

static fb_status set_sort(fb_shard_set *s, const char *dir, fb_error *err)
{
    uint32_t n = 0;
    s->by_name = calloc((size_t)s->n_tensor + 1, sizeof *s->by_name);
    if (!s->by_name)
        return fb_fail_file(err, FB_NOMEM, dir, "no memory for a table of %u tensors", s->n_tensor);
    for (uint32_t k = 0; k < s->n_shard; k++)
        for (uint32_t i = 0; i < fb_shard_count(s->shards[k]); i++)
            s->by_name[n++] = fb_shard_at(s->shards[k], i);
    qsort(s->by_name, n, sizeof *s->by_name, compare_name);
    return FB_OK;
}

fb_status fb_shard_set_open(fb_shard_set **out, const char *dir, fb_error *err)
{
    fb_status     st = FB_OK;
    char          single[FB_PATH_SIZE], index[FB_PATH_SIZE];
    json_t       *root = NULL, *map = NULL;
    fb_shard_set *s = calloc(1, sizeof *s);
    if (!s)
        return fb_fail_file(err, FB_NOMEM, dir, "no memory for a set of shards");
    FB_TRY(fb_path_join(single, sizeof single, dir, single_name, err));
    FB_TRY(fb_path_join(index, sizeof index, dir, index_name, err));
    if (fb_file_exists(single)) { /* first, as transformers looks for them */
        s->shards = calloc(1, sizeof *s->shards);
        if (!s->shards) {
            st = fb_fail_file(err, FB_NOMEM, dir, "no memory for a shard");
            goto done;
        }
        FB_TRY(set_open_shard(s, dir, single_name, err));
    } else if (fb_file_exists(index)) {
        FB_TRY(read_index(&root, &map, index, err));
        FB_TRY(open_mapped(s, dir, index, map, err));
        FB_TRY(check_mapped(s, index, map, err));
    } else {
        st = fb_fail_file(err, FB_INPUT, dir, "holds neither %s nor %s; name the folder of a Hugging Face checkpoint", single_name,
                          index_name);
        goto done;
    }
    FB_TRY(set_sort(s, dir, err));
    *out = s;
    s = NULL;
done:
    json_decref(root);
    fb_shard_set_close(s);
    return st;
}

const fb_tensor *fb_shard_set_find(const fb_shard_set *s, const char *name)
{
    const fb_tensor *const *found = bsearch(name, s->by_name, s->n_tensor, sizeof *s->by_name, compare_key);
    return found ? *found : NULL;
}

uint32_t fb_shard_set_count(const fb_shard_set *s)
{
    return s->n_tensor;
}

const fb_tensor *fb_shard_set_at(const fb_shard_set *s, uint32_t i)
{
    for (uint32_t k = 0; k < s->n_shard; k++) {
        uint32_t n = fb_shard_count(s->shards[k]);
        if (i < n)
            return fb_shard_at(s->shards[k], i);
        i -= n;
    }
    return NULL;
}

void fb_shard_set_close(fb_shard_set *s)
{
    if (!s)
        return;
    for (uint32_t k = 0; k < s->n_shard; k++)
        fb_shard_close(s->shards[k]);
    free(s->shards);
    free(s->by_name);
    free(s);
}
