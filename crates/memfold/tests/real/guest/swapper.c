/* Memory of more than there is, every word of it known: pages are checked and rewritten at random, through the guest's swap.
 *
 * swapper MIB STATUS STOP: writes a line to STATUS each second (seconds, pages checked, wrong words, longest access in that second in
 * microseconds); when STOP is there it checks all words and says so in a last line. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define WORDS 512

static uint64_t now_us(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000ull + t.tv_nsec / 1000;
}

static uint64_t word(uint64_t page, uint64_t version, uint64_t at) {
    uint64_t x = page * 0x9E3779B97F4A7C15ull + version * 0xC2B2AE3D27D4EB4Full + at;
    x ^= x >> 29;
    return x * 0xBF58476D1CE4E5B9ull;
}

static uint64_t check(const uint64_t *p, uint64_t page, uint32_t version, uint64_t step) {
    uint64_t wrong = 0;
    for (uint64_t i = version % step; i < WORDS; i += step)
        wrong += p[i] != word(page, version, i);
    return wrong;
}

static void fill(uint64_t *p, uint64_t page, uint32_t version) {
    for (uint64_t i = 0; i < WORDS; i++)
        p[i] = word(page, version, i);
}

int main(int count, char **words) {
    if (count != 4)
        return 2;
    uint64_t pages = strtoull(words[1], 0, 10) * 256, done = 0, wrong = 0, x = 88172645463325252ull;
    uint64_t *memory = mmap(0, pages * 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    uint32_t *versions = mmap(0, pages * 4, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
    /* What is to be compared must not come from the same disk. */
    if (memory == MAP_FAILED || versions == MAP_FAILED || mlock(versions, pages * 4))
        return 3;
    FILE *status = fopen(words[2], "w");
    if (!status)
        return 4;
    setvbuf(status, 0, _IOLBF, 0);
    for (uint64_t page = 0; page < pages; page++)
        fill(memory + page * WORDS, page, 0);
    uint64_t begun = now_us(), second = begun, longest = 0;
    while (access(words[3], F_OK)) {
        for (int turn = 0; turn < 64; turn++) {
            x ^= x << 13, x ^= x >> 7, x ^= x << 17;
            uint64_t page = x % pages, before = now_us();
            /* Each eighth word: to reckon all takes longer than to swap. */
            wrong += check(memory + page * WORDS, page, versions[page], 8);
            if (x >> 63)
                fill(memory + page * WORDS, page, ++versions[page]);
            uint64_t took = now_us() - before;
            longest = took > longest ? took : longest;
            done++;
        }
        /* It leaves others a part of its core: what is tested is where pages are, not how fast they come. */
        usleep(20000);
        uint64_t now = now_us();
        if (now - second >= 1000000) {
            fprintf(status, "%.1f %lu %lu %lu\n", (now - begun) / 1e6, done, wrong, longest);
            second = now, longest = 0;
        }
    }
    for (uint64_t page = 0; page < pages; page++)
        wrong += check(memory + page * WORDS, page, versions[page], 1);
    fprintf(status, "end %lu pages, %lu words wrong\n", pages, wrong);
    return wrong != 0;
}
