/* Shards are built here field by field from the layout in io/tokens.h. */
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <xxhash.h>

#include "io/tokens.h"
#include "temp_dir.h"

enum { IDS = 128, LABELS = 192, DOCS = 256, META = 320, SIZE = 325 };

/* Two documents of 3 and 2 tokens. */
typedef struct image {
    unsigned char bytes[SIZE + 8];
} image;

static void put32(image *m, size_t at, uint32_t v)
{
    memcpy(m->bytes + at, &v, 4);
}

static void put64(image *m, size_t at, uint64_t v)
{
    memcpy(m->bytes + at, &v, 8);
}

static void seal(image *m)
{
    put64(m, 88, XXH3_64bits(m->bytes + 128, SIZE - 128));
}

static image good(uint32_t label_kind)
{
    image          m = { { 0 } };
    const uint32_t ids[] = { 5, 9, 7, 3, 8 };
    const int32_t  labels[] = { -100, 9, 6, -100, -100 };
    const uint8_t  mask[] = { 0, 1, 1, 0, 0 };
    const uint64_t docs[] = { 0, 3, 5 };
    memcpy(m.bytes, "FBTOKENS", 8);
    put32(&m, 8, 1);
    put32(&m, 12, 128);
    put64(&m, 16, 5);
    put64(&m, 24, 2);
    put64(&m, 32, 2);
    put64(&m, 40, IDS);
    put64(&m, 48, LABELS);
    put64(&m, 56, DOCS);
    put64(&m, 64, META);
    put64(&m, 72, 5);
    put64(&m, 80, SIZE);
    put32(&m, 96, label_kind);
    put32(&m, 100, 9);
    put32(&m, 104, 3);
    memcpy(m.bytes + IDS, ids, sizeof ids);
    if (label_kind)
        memcpy(m.bytes + LABELS, labels, sizeof labels);
    else
        memcpy(m.bytes + LABELS, mask, sizeof mask);
    memcpy(m.bytes + DOCS, docs, sizeof docs);
    memcpy(m.bytes + META, "{}   ", 5);
    seal(&m);
    return m;
}

static fb_status open_image(fb_tokens *t, const image *m, size_t size, fb_error *err)
{
    temp_write("t.fbt", m->bytes, size);
    return fb_tokens_open(t, temp_path("t.fbt"), err);
}

static void reads_both_kinds_of_labels(void **unused)
{
    (void)unused;
    for (uint32_t kind = 0; kind < 2; kind++) {
        fb_error  err = { 0 };
        fb_tokens t = { 0 };
        image     m = good(kind);
        if (open_image(&t, &m, SIZE, &err) != FB_OK)
            fail_msg("%s", err.msg);
        assert_int_equal(t.n_token, 5);
        assert_int_equal(t.n_doc, 2);
        assert_int_equal(t.n_learned, 2);
        assert_int_equal(t.id_max, 9);
        assert_int_equal(t.doc_len_max, 3);
        assert_true(t.checksum == XXH3_64bits(m.bytes + 128, SIZE - 128));
        assert_int_equal(t.ids[3], 3);
        assert_int_equal(t.doc_start[1], 3);
        assert_int_equal(t.meta_size, 5);
        const int32_t want[] = { -100, 9, kind ? 6 : 7, -100, -100 };
        for (uint64_t i = 0; i < 5; i++)
            assert_int_equal(fb_tokens_label(&t, i), want[i]);
        fb_tokens_close(&t);
        fb_tokens_close(&t);
    }
}

static void refuses_each_broken_field(void **unused)
{
    (void)unused;
    static const struct {
        size_t      at, width;
        uint64_t    value;
        uint32_t    label_kind;
        const char *part;
    } cases[] = {
        { 0, 1, 'X', 0, "does not begin with FBTOKENS" },
        { 8, 4, 2, 0, "has version 2" },
        { 12, 4, 64, 0, "claims a header of 64 bytes" },
        { 16, 8, 6, 0, "its documents end at token 5 of 6" },
        { 16, 8, UINT64_MAX, 0, "section ids (18446744073709551615 entries" },
        { 16, 8, UINT64_C(1) << 62, 0, "passes the file's end" },
        { 24, 8, UINT64_MAX, 0, "claims 18446744073709551615 documents" },
        { 24, 8, 1, 0, "its documents end at token 3 of 5" },
        { 24, 8, 100, 0, "section documents (101 entries" },
        { 32, 8, 3, 0, "2 tokens are learned, the header says 3" },
        { 40, 8, 132, 0, "section ids starts at byte 132, not at a multiple of 64" },
        { 40, 8, 64, 0, "inside the header" },
        { 40, 8, LABELS, 0, "sections ids and labels overlap" },
        { 48, 8, 384, 0, "section labels (5 entries at byte 384) passes" },
        { 56, 8, UINT64_MAX - 63, 0, "section documents" },
        { 64, 8, DOCS, 0, "sections documents and metadata overlap" },
        { 72, 8, 6, 0, "section metadata" },
        { 72, 8, UINT64_C(1) << 40, 0, "bytes of metadata, at most" },
        { 80, 8, SIZE + 1, 0, "was written with 326 bytes and now has 325" },
        { 88, 8, 0, 0, "the checksum does not match" },
        { 96, 4, 2, 0, "has label kind 2" },
        { 100, 4, 8, 0, "token 1 has id 9, the header's largest is 8" },
        { 100, 4, 0x80000000u, 0, "has a largest id of 2147483648" },
        { 104, 4, 4, 0, "its longest document has 3 tokens, the header says 4" },
        { 127, 1, 1, 0, "reserved header byte (127)" },
        { IDS + 4, 4, 10, 0, "token 1 has id 10" },
        { LABELS + 1, 1, 2, 0, "token 1 has label mask 2" },
        { LABELS + 3, 1, 1, 0, "the first token of document 1 is marked as learned" },
        { LABELS + 4, 4, 10, 1, "token 1 has label 10" },
        { LABELS + 4, 4, (uint32_t)-1, 1, "token 1 has label -1" },
        { LABELS, 4, 3, 1, "the first token of document 0 is marked as learned" },
        { DOCS, 8, 1, 0, "its first document starts at token 1" },
        { DOCS + 8, 8, 0, 0, "document 0 starts at token 0 and ends at 0" },
        { DOCS + 8, 8, 6, 0, "document 1 starts at token 6 and ends at 5" },
        { META, 1, '[', 0, "its metadata is not a JSON object" },
    };
    for (size_t i = 0; i < FB_COUNT(cases); i++) {
        fb_error  err = { 0 };
        fb_tokens t = { 0 };
        image     m = good(cases[i].label_kind);
        memcpy(m.bytes + cases[i].at, &cases[i].value, cases[i].width);
        if (cases[i].at != 88)
            seal(&m);
        expect_failure(open_image(&t, &m, SIZE, &err), FB_INPUT, &err, cases[i].part);
        assert_null(t.map);
    }
}

static void refuses_damage_and_absence(void **unused)
{
    (void)unused;
    fb_error  err = { 0 };
    fb_tokens t = { 0 };
    image     m = good(0);
    for (size_t size = 0; size < SIZE; size++)
        assert_int_equal(open_image(&t, &m, size, &err), FB_INPUT);
    for (size_t at = 128; at < SIZE; at++) { /* each byte of the body, padding too, is covered by the checksum */
        image broken = m;
        broken.bytes[at] ^= 0x40;
        expect_failure(open_image(&t, &broken, SIZE, &err), FB_INPUT, &err, "the checksum does not match");
    }
    expect_failure(fb_tokens_open(&t, temp_path("none"), &err), FB_INPUT, &err, "none: there is no such file");
    expect_failure(fb_tokens_open(&t, temp_dir, &err), FB_INPUT, &err, "is a folder");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(reads_both_kinds_of_labels, temp_dir_make, temp_dir_remove),
        cmocka_unit_test_setup_teardown(refuses_each_broken_field, temp_dir_make, temp_dir_remove),
        cmocka_unit_test_setup_teardown(refuses_damage_and_absence, temp_dir_make, temp_dir_remove),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
