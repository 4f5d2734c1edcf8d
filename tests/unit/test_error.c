#include "base/error.h"

#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static void fail_returns_the_status_and_writes_the_sentence(void **state)
{
    (void)state;
    fb_error err = { .status = FB_OK };
    assert_int_equal(fb_fail(&err, FB_NOFIT, "plan: %d slots need %s", 2, "3.22 GiB"), FB_NOFIT);
    assert_int_equal(err.status, FB_NOFIT);
    assert_string_equal(err.msg, "plan: 2 slots need 3.22 GiB");
    assert_int_equal(fb_fail(NULL, FB_IO, "nobody reads this: %s", "x"), FB_IO);
}

static void a_long_sentence_is_cut_not_overrun(void **state)
{
    (void)state;
    struct {
        fb_error      err;
        unsigned char beyond[16];
    } guarded;
    memset(&guarded, 0xa5, sizeof guarded);
    char name[4096];
    memset(name, 'n', sizeof name - 1);
    name[sizeof name - 1] = '\0';
    fb_fail(&guarded.err, FB_INPUT, "%s is missing", name);
    assert_int_equal(strlen(guarded.err.msg), sizeof guarded.err.msg - 1);
    for (size_t i = 0; i < sizeof guarded.beyond; i++)
        assert_int_equal(guarded.beyond[i], 0xa5);
}

/* The documented exit codes: 0 done; 1 failure; 2 config; 3 bad file; 4 does not fit; 5 not finite; 75 stopped. */
static void exit_codes_are_the_documented_ones(void **state)
{
    (void)state;
    static const struct {
        fb_status status;
        int       code;
    } documented[] = {
        { FB_OK, 0 },     { FB_FAILED, 1 }, { FB_IO, 1 },    { FB_NOMEM, 1 },     { FB_DEVICE, 1 },
        { FB_CONFIG, 2 }, { FB_INPUT, 3 },  { FB_NOFIT, 4 }, { FB_NONFINITE, 5 }, { FB_STOPPED, 75 },
    };
    assert_int_equal(FB_COUNT(documented), FB_STATUS_COUNT);
    for (size_t i = 0; i < FB_COUNT(documented); i++)
        assert_int_equal(fb_status_exit_code(documented[i].status), documented[i].code);
    assert_int_equal(fb_status_exit_code((fb_status)1000), 1);
}

static void every_status_has_its_own_text(void **state)
{
    (void)state;
    for (int i = 0; i < FB_STATUS_COUNT; i++)
        for (int k = 0; k < i; k++)
            assert_string_not_equal(fb_status_str((fb_status)i), fb_status_str((fb_status)k));
    assert_string_equal(fb_status_str((fb_status)1000), "unknown status");
    assert_true(strlen(fb_version()) > 0);
}

/* Text that a terminal obeys, or that is no text, goes; what is left is what was there. */
static void sentences_are_printable(void **state)
{
    (void)state;
    static const struct {
        const char *text, *shown;
    } cases[] = {
        { "tensor 'caf\xc3\xa9 \xe4\xb8\xad \xf0\x9f\x98\x80'", "tensor 'caf\xc3\xa9 \xe4\xb8\xad \xf0\x9f\x98\x80'" },
        { "a\x1b[2Jb\nc\x7f", "a?[2Jb?c?" },
        { "\xc2\x9b" "2J", "??2J" },               /* C1: as good as ESC [ */
        { "\xe2\x80\xae" "cba", "???cba" },       /* right-to-left override */
        { "\xe2\x80\xa8" "x", "???x" },           /* line separator */
        { "\xff\xc3", "??" },                      /* a byte of no character; one that is cut */
        { "\xc0\xaf \xe0\x80\xaf", "?? ???" },  /* overlong */
        { "\xed\xa0\x80", "???" },                /* surrogate */
        { "\xf4\x90\x80\x80", "????" },          /* past U+10FFFF */
    };
    for (size_t i = 0; i < FB_COUNT(cases); i++) {
        fb_error err;
        fb_fail(&err, FB_INPUT, "%s", cases[i].text);
        assert_string_equal(err.msg, cases[i].shown);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(fail_returns_the_status_and_writes_the_sentence),
        cmocka_unit_test(a_long_sentence_is_cut_not_overrun),
        cmocka_unit_test(exit_codes_are_the_documented_ones),
        cmocka_unit_test(every_status_has_its_own_text),
        cmocka_unit_test(sentences_are_printable),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
