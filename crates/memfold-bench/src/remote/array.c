/* An array of more memory than the guest has, every word of it known, read and written through the guest's swap as it is told.
 *
 * array MIB FIFO ANSWER: fills MIB, then does what each line of FIFO says, and puts a line for each into the file ANSWER (renamed into place):
 *   seqread|randread|seqwrite|randwrite BLOCK SECONDS   ANSWER: accesses bytes microseconds wrong-words p50-ns p99-ns longest-ns
 *   mixed FILE                                          the same while FILE is there: pages at random, each other one written
 *   check                                               every word
 *   end
 * An access touches all pages of a block, eight words of each. Only the array can be swapped out. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#define WORDS 512
#define PAGE 4096
#define KEPT (1 << 20)

static uint64_t *memory, pages, next_page, chance = 88172645463325252ull;
static uint32_t *versions;
static uint64_t *times;

static uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ull + t.tv_nsec;
}

static uint64_t word(uint64_t page, uint64_t version, uint64_t at) {
    uint64_t x = page * 0x9E3779B97F4A7C15ull + version * 0xC2B2AE3D27D4EB4Full + at;
    x ^= x >> 29;
    return x * 0xBF58476D1CE4E5B9ull;
}

static uint64_t check(uint64_t page, uint64_t step) {
    uint64_t wrong = 0, *p = memory + page * WORDS;
    for (uint64_t i = versions[page] % step; i < WORDS; i += step)
        wrong += p[i] != word(page, versions[page], i);
    return wrong;
}

static void fill(uint64_t page) {
    uint64_t *p = memory + page * WORDS;
    for (uint64_t i = 0; i < WORDS; i++)
        p[i] = word(page, versions[page], i);
}

static uint64_t random_number(void) {
    chance ^= chance << 13, chance ^= chance >> 7, chance ^= chance << 17;
    return chance;
}

static int by_size(const void *a, const void *b) {
    uint64_t x = *(const uint64_t *)a, y = *(const uint64_t *)b;
    return x < y ? -1 : x > y;
}

/* Blocks one behind the other (at random if told), until the time is over or the file is gone. */
static void work(FILE *answer, uint64_t block, double seconds, int is_random, int is_write, const char *while_there) {
    uint64_t each = block / PAGE, blocks = pages / each, count = 0, wrong = 0, longest = 0, begun = now_ns(), now = begun;
    uint64_t end = begun + (uint64_t)(seconds * 1e9);
    while (while_there ? (count & 15) || !access(while_there, F_OK) : now < end) {
        uint64_t first = (is_random ? random_number() % blocks : next_page++ % blocks) * each, before = now_ns();
        /* A write of whole pages that has not read them is what programs seldom do: each is looked at first. */
        for (uint64_t page = first; page < first + each; page++) {
            wrong += check(page, 64);
            if (is_write && (!while_there || count & 1)) {
                versions[page]++;
                fill(page);
            }
        }
        now = now_ns();
        times[count % KEPT] = now - before;
        longest = now - before > longest ? now - before : longest;
        count++;
    }
    uint64_t kept = count < KEPT ? count : KEPT;
    qsort(times, kept, sizeof *times, by_size);
    fprintf(answer, "%lu %lu %lu %lu %lu %lu %lu\n", count, count * block, (now - begun) / 1000, wrong, kept ? times[kept / 2] : 0,
            kept ? times[kept * 99 / 100] : 0, longest);
}

int main(int count, char **words) {
    if (count != 4)
        return 2;
    pages = strtoull(words[1], 0, 10) << 8;
    memory = mmap(0, pages * PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    versions = calloc(pages, sizeof *versions);
    times = calloc(KEPT, sizeof *times);
    /* No huge pages: one fault for each page, as the study had. What is compared with must not come from the same disk. */
    if (memory == MAP_FAILED || madvise(memory, pages * PAGE, MADV_NOHUGEPAGE) || !versions || !times ||
        mlock(versions, pages * sizeof *versions) || mlock(times, KEPT * sizeof *times))
        return 3;
    for (uint64_t page = 0; page < pages; page++)
        fill(page);
    char line[256], kind[32], what[128], hidden[256];
    snprintf(hidden, sizeof hidden, "%s.new", words[3]);
    /* Opened for both, so that it has no end when a writer has gone. */
    int fifo = open(words[2], O_RDWR);
    FILE *orders = fifo < 0 ? 0 : fdopen(fifo, "r");
    if (!orders)
        return 4;
    while (fgets(line, sizeof line, orders)) {
        double seconds = 0;
        what[0] = 0;
        if (sscanf(line, "%31s %127s %lf", kind, what, &seconds) < 1)
            continue;
        if (!strcmp(kind, "end"))
            return 0;
        FILE *answer = fopen(hidden, "w");
        if (!answer)
            return 5;
        if (!strcmp(kind, "check")) {
            uint64_t wrong = 0;
            for (uint64_t page = 0; page < pages; page++)
                wrong += check(page, 1);
            fprintf(answer, "%lu %lu 0 %lu 0 0 0\n", pages, pages * PAGE, wrong);
        } else if (!strcmp(kind, "mixed")) {
            work(answer, PAGE, 0, 1, 1, what);
        } else {
            work(answer, strtoull(what, 0, 10), seconds, !strncmp(kind, "rand", 4), !!strstr(kind, "write"), 0);
        }
        fclose(answer);
        if (rename(hidden, words[3]))
            return 6;
    }
    return 7;
}
