// SPDX-License-Identifier: GPL-2.0
/*
 * uffdio-move-count: does UFFDIO_MOVE count every page that it has moved?
 *
 * One thread moves 64 small anonymous pages from A to B and back. A second thread makes the kernel
 * return -EAGAIN for the first page from time to time: it clears the page's accessed bit
 * (MADV_COLD) and reads the page, which sets the bit again. If the bit changes between the two
 * looks of move_pages_ptes() at the page table entry, move_pages() in mm/userfaultfd.c retries.
 *
 * After each failed UFFDIO_MOVE the program asks the page map where the pages are. If more pages
 * are at the target than the kernel says it has moved, the kernel has the fault.
 *
 * Build:  cc -O2 -pthread -o uffdio-move-count uffdio-move-count.c
 * Run:    ./uffdio-move-count [SECONDS]      (default 10; needs no privileges)
 * Exit:   0 not seen; 1 seen; 77 cannot run here (no UFFDIO_MOVE, no userfaultfd)
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/utsname.h>
#include <time.h>
#include <unistd.h>

#define PAGES 64

/* From Linux 6.8's linux/userfaultfd.h, for older headers. */
#define FEATURE_MOVE (1ull << 16)
struct move {
	uint64_t dst, src, len, mode;
	int64_t moved;
};
#define IOCTL_MOVE _IOWR(UFFDIO, 0x05, struct move)

static size_t page_size;
static volatile char *contested; /* the page whose accessed bit changes */
static atomic_bool stop;

static void cannot_run(const char *what)
{
	printf("cannot run: %s: %s\n", what, strerror(errno));
	exit(77);
}

/* Clears and sets the accessed bit of the first page. While the page is elsewhere, the read waits
 * (the range is registered for missing pages) until UFFDIO_MOVE brings the page back. */
static void *change_accessed_bit(void *unused)
{
	while (!atomic_load(&stop)) {
		madvise((void *)contested, page_size, MADV_COLD);
		(void)*contested;
	}
	return unused;
}

static char *map_registered(int uffd)
{
	size_t length = PAGES * page_size;
	char *area = mmap(NULL, length, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (area == MAP_FAILED)
		cannot_run("mmap");
	madvise(area, length, MADV_NOHUGEPAGE);
	struct uffdio_register all = {
		.range = { (uintptr_t)area, length },
		.mode = UFFDIO_REGISTER_MODE_MISSING,
	};
	if (ioctl(uffd, UFFDIO_REGISTER, &all))
		cannot_run("UFFDIO_REGISTER");
	return area;
}

/* Counts the pages that exist in an area: in memory (bit 63) or swapped out (bit 62). */
static int pages_at(int pagemap, const char *area)
{
	uint64_t entries[PAGES];
	off_t at = (off_t)((uintptr_t)area / page_size * sizeof(entries[0]));
	if (pread(pagemap, entries, sizeof(entries), at) != sizeof(entries))
		cannot_run("/proc/self/pagemap");
	int found = 0;
	for (int i = 0; i < PAGES; i++)
		found += entries[i] >> 62 != 0;
	return found;
}

int main(int argc, char **argv)
{
	int seconds = argc > 1 ? atoi(argv[1]) : 10;
	struct utsname host;
	uname(&host);
	page_size = sysconf(_SC_PAGESIZE);
	int uffd = syscall(SYS_userfaultfd, O_CLOEXEC | UFFD_USER_MODE_ONLY);
	if (uffd < 0)
		cannot_run("userfaultfd");
	struct uffdio_api api = { .api = UFFD_API, .features = FEATURE_MOVE };
	if (ioctl(uffd, UFFDIO_API, &api))
		cannot_run("UFFD_FEATURE_MOVE (Linux 6.8 or newer)");
	int pagemap = open("/proc/self/pagemap", O_RDONLY | O_CLOEXEC);
	if (pagemap < 0)
		cannot_run("/proc/self/pagemap");

	char *from = map_registered(uffd), *to = map_registered(uffd);
	char *bytes = malloc(PAGES * page_size);
	memset(bytes, 7, PAGES * page_size);
	struct uffdio_copy fill = {
		.dst = (uintptr_t)from, .src = (uintptr_t)bytes, .len = PAGES * page_size,
	};
	if (ioctl(uffd, UFFDIO_COPY, &fill))
		cannot_run("UFFDIO_COPY");
	contested = from;
	pthread_t thread;
	if (pthread_create(&thread, NULL, change_accessed_bit, NULL))
		cannot_run("pthread_create");

	long calls = 0, wrong = 0;
	time_t end = time(NULL) + seconds;
	while (time(NULL) < end && wrong == 0) {
		struct move out = { (uintptr_t)to, (uintptr_t)from, PAGES * page_size, 0, 0 };
		int result = ioctl(uffd, IOCTL_MOVE, &out), error = errno;
		calls++;
		int there = pages_at(pagemap, to);
		int told = out.moved < 0 ? 0 : (int)(out.moved / (int64_t)page_size);
		if (result && there > told) {
			wrong++;
			printf("call %ld: UFFDIO_MOVE of %d pages failed: %s\n"
			       "  told (uffdio_move.move): %lld, that is %d pages\n"
			       "  moved (page map):        %d pages at the target, %d at the source\n",
			       calls, PAGES, strerror(error), (long long)out.moved, told,
			       there, pages_at(pagemap, from));
		}
		/* Everything back, page by page, so that no count is needed. */
		for (int i = 0; i < PAGES; i++) {
			struct move back = {
				(uintptr_t)from + i * page_size, (uintptr_t)to + i * page_size,
				page_size, 0, 0,
			};
			while (ioctl(uffd, IOCTL_MOVE, &back) && errno == EAGAIN)
				;
		}
		/* A move that fails wakes nobody, though it may have brought the page back. */
		struct uffdio_range range = { (uintptr_t)from, PAGES * page_size };
		ioctl(uffd, UFFDIO_WAKE, &range);
	}
	atomic_store(&stop, 1);
	pthread_join(thread, NULL);
	printf("Linux %s: %s in %ld calls of UFFDIO_MOVE\n", host.release,
	       wrong ? "SEEN: moved pages were not counted" : "not seen", calls);
	return wrong != 0;
}
