//! Samples pages by content: of each content, either all copies are in the sample or none.
//!
//! A random sample of pages would miss most pairs of equal pages: a sample of one page in ten
//! contains both pages of a pair with a chance of 1 in 100. Contents are therefore drawn by their
//! hash (Gibbons, "Distinct Sampling for Highly-Accurate Answers to Distinct Values Queries and
//! Event Reports", VLDB 2001). All copies of a content are then drawn together, and a sum over
//! contents, multiplied by 2^level, is right on average. Every page is read and hashed. The size of
//! the sample only limits how many pages are remembered and read a second time. The level of the
//! sample rises whenever the sample is full:
//!
//! ```text
//!   level 0:  all contents        level 1: hash begins with 0        level 2: with 00        ...
//!             sample is full ---->           half of it is dropped -->
//! ```
//! A content with very many copies would make the estimate depend on whether it was drawn by
//! chance. So such contents are not sampled but counted separately ([`Frequent`]). Pages of zeroes
//! are always counted separately.

use foldhash::HashMap;

/// Result of the second read of a page.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Again {
    /// The page was not read a second time.
    #[default]
    NotLooked,
    /// The page's bytes were the same at both reads.
    Same,
    /// The page's bytes differed, or the page no longer existed.
    Changed,
}

/// Facts about a page that was read.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Hash of the page's bytes.
    pub hash: u64,
    /// The page's address in QEMU divided by 4096.
    pub page: u64,
    /// Number of the host's page frame that holds the page; 0: unknown, because it may not be read.
    pub frame: u64,
    /// Index of the VM that the page belongs to, in the list of targets.
    pub vm: u32,
    /// Whether a huge page maps the page.
    pub huge: bool,
    /// Whether KSM has merged the page with other pages that were read. It is only set in
    /// [`Frequent::kept`].
    pub merged: bool,
    /// Result of reading the page a second time.
    pub again: Again,
}

impl Seen {
    /// Returns the block of 2 MiB that contains the page: the index of the VM, and the address in
    /// QEMU divided by 2 MiB.
    #[must_use]
    pub const fn huge_page(&self) -> (u32, u64) {
        (self.vm, self.page >> 9)
    }

    /// Returns a pseudorandom number that depends only on the page's VM and address.
    fn place(&self) -> u64 {
        // The finalizer of SplitMix64 (Steele, Lea, Flood 2014).
        let mut z = (self.page ^ u64::from(self.vm) << 52).wrapping_add(0x9E37_79B9_7F4A_7C15);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }
}

/// A page content with many copies. All copies are counted, but only some of them are recorded
/// (`kept`).
#[derive(Clone, Debug, Default)]
pub struct Frequent {
    /// Number of contents for which this content stands in sums: 2^level at the sample level at
    /// which the content was found to be frequent.
    pub weight: f64,
    /// Number of copies in each VM, by the index of the VM.
    pub pages: Vec<u64>,
    /// Number of copies in each huge page that holds copies, by [`Seen::huge_page`].
    pub huge: HashMap<(u32, u64), u32>,
    /// Recorded copies: a sample of all copies, drawn by VM and address.
    pub kept: Vec<Seen>,
    level: u32,
    room: usize,
}

impl Frequent {
    /// Creates a content without copies, of which at most `room` copies will be recorded.
    #[must_use]
    pub fn new(weight: f64, room: usize) -> Self {
        Self {
            weight,
            room,
            ..Self::default()
        }
    }

    /// Adds a copy of the content.
    pub fn add(&mut self, seen: Seen) {
        let vm = seen.vm as usize;
        if self.pages.len() <= vm {
            self.pages.resize(vm + 1, 0);
        }
        self.pages[vm] += 1;
        if seen.huge {
            *self.huge.entry(seen.huge_page()).or_default() += 1;
        }
        if seen.place().leading_zeros() >= self.level {
            self.kept.push(seen);
        }
        while self.kept.len() > self.room {
            self.halve();
        }
    }

    /// Drops about half of the recorded copies.
    pub fn halve(&mut self) {
        self.level += 1;
        let level = self.level;
        self.kept.retain(|s| s.place().leading_zeros() >= level);
    }

    /// Returns whether all copies are recorded in `kept`.
    #[must_use]
    pub const fn is_whole(&self) -> bool {
        self.level == 0
    }

    /// Returns the number of copies in the VM with index `vm`.
    #[must_use]
    pub fn of(&self, vm: usize) -> u64 {
        self.pages.get(vm).copied().unwrap_or(0)
    }
}

/// The sample of pages, and the frequent contents that are counted beside the sample.
#[derive(Debug)]
pub struct Sample {
    room: usize,
    level: u32,
    /// All pages that hold one of the sampled contents.
    pub pages: Vec<Seen>,
    /// Pages of zeroes.
    pub zero: Frequent,
    /// Other contents with many copies, by the hash of the content.
    pub frequent: HashMap<u64, Frequent>,
}

/// Most contents that are counted separately.
const MOST_FREQUENT: usize = 1024;

impl Sample {
    /// Creates an empty sample of at most `room` pages (at least 1024). Beside them, up to
    /// `room / 16` pages of zeroes are recorded.
    #[must_use]
    pub fn new(room: usize) -> Self {
        Self {
            room: room.max(MOST_FREQUENT),
            level: 0,
            pages: Vec::new(),
            zero: Frequent::new(1.0, (room / 16).max(MOST_FREQUENT)),
            frequent: HashMap::default(),
        }
    }

    /// Adds a page, which must not hold only zeroes. The page is ignored if its content is not
    /// sampled.
    pub fn add(&mut self, seen: Seen) {
        if let Some(frequent) = self.frequent.get_mut(&seen.hash) {
            frequent.add(seen);
        } else if seen.hash.leading_zeros() >= self.level {
            self.pages.push(seen);
            while self.pages.len() > self.room {
                self.halve();
            }
        }
    }

    /// Drops about half of the sampled contents and raises the level by one. Contents with many
    /// copies leave the sample, and are counted separately from then on.
    pub fn halve(&mut self) {
        self.pages.sort_unstable_by_key(|seen| seen.hash);
        let many = (self.room / MOST_FREQUENT).max(8);
        let weight = self.weight();
        let mut left = Vec::with_capacity(self.pages.len());
        for group in self.pages.chunk_by(|a, b| a.hash == b.hash) {
            if group.len() < many || self.frequent.len() >= MOST_FREQUENT {
                left.extend_from_slice(group);
                continue;
            }
            let frequent = self
                .frequent
                .entry(group[0].hash)
                .or_insert_with(|| Frequent::new(weight, 4096));
            for &seen in group {
                frequent.add(seen);
            }
        }
        self.level += 1;
        let level = self.level;
        left.retain(|seen| seen.hash.leading_zeros() >= level);
        self.pages = left;
    }

    /// Returns the level: a content is sampled if its hash begins with at least this number of zero
    /// bits.
    #[must_use]
    pub const fn level(&self) -> u32 {
        self.level
    }

    /// Returns the number of contents for which each sampled content stands in sums: 2^level.
    #[must_use]
    pub fn weight(&self) -> f64 {
        f64::from(self.level).exp2()
    }
}

#[cfg(test)]
mod tests {
    use super::super::statistics::Sum;
    use super::*;

    /// Makes a population of contents: for each, the number of copies in VMs 0 and 1.
    fn population() -> Vec<(u64, u64)> {
        let mut contents = vec![(1, 0); 3000];
        contents.extend(vec![(1, 1); 2000]);
        contents.extend(vec![(3, 2); 300]);
        contents.extend(vec![(40, 10); 20]);
        // One content with so many copies that it would dominate the estimate if it were sampled.
        contents.push((6000, 4000));
        contents
    }

    /// Returns the number of pages that merging all copies would save.
    fn truth() -> f64 {
        let saved = population().into_iter().map(|(a, b)| a + b - 1);
        saved.sum::<u64>() as f64
    }

    /// Adds the population to a sample in random order, and estimates the saving.
    fn estimated(room: usize, seed: u64) -> (f64, f64, Sample) {
        let mut random = seed;
        let mut next = || {
            random = random
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            random ^ random >> 29
        };
        let mut pages = Vec::new();
        for (content, (a, b)) in (0_u64..).zip(population()) {
            let hash = xxhash_rust::xxh3::xxh3_64_with_seed(&content.to_ne_bytes(), seed);
            for copy in 0..a + b {
                pages.push(Seen {
                    hash,
                    page: content << 20 | copy,
                    vm: u32::from(copy >= a),
                    ..Seen::default()
                });
            }
        }
        for at in (1..pages.len()).rev() {
            let other = usize::try_from(next() >> 1).unwrap() % (at + 1);
            pages.swap(at, other);
        }
        let mut sample = Sample::new(room);
        for seen in pages {
            sample.add(seen);
        }
        sample.pages.sort_unstable_by_key(|seen| seen.hash);
        let mut sum = Sum::default();
        for group in sample.pages.chunk_by(|a, b| a.hash == b.hash) {
            sum.add(group.len() as f64 - 1.0, sample.weight());
        }
        for frequent in sample.frequent.values() {
            let pages = frequent.pages.iter().sum::<u64>() as f64;
            sum.add(pages - 1.0, frequent.weight);
        }
        (sum.total(), sum.plus_minus(), sample)
    }

    #[test]
    fn if_the_sample_of_an_estimate_has_room_for_all_pages_the_sum_is_exact() {
        let (sum, plus_minus, sample) = estimated(1 << 20, 7);
        assert_eq!((sum, plus_minus), (truth(), 0.0));
        assert!(sample.frequent.is_empty());
    }

    /// Checks that estimates are unbiased, and that the true value lies in the interval as often as
    /// stated. A wrong weight, a lost copy or a content that is drawn too often would fail.
    #[test]
    fn estimates_are_right_on_average_and_95_percent_of_error_bars_contain_the_true_sum() {
        const SEEDS: u32 = 400;
        let truth = truth();
        let (mut sum, mut squares, mut inside) = (0.0, 0.0, 0);
        for seed in 1..=SEEDS {
            let (estimate, plus_minus, sample) = estimated(2048, u64::from(seed) * 7919);
            assert!(sample.weight() >= 2.0 && sample.pages.len() <= 2048);
            sum += estimate;
            squares += (estimate - truth).powi(2);
            inside += u32::from((estimate - truth).abs() <= plus_minus);
        }
        let mean = sum / f64::from(SEEDS);
        let deviation = (squares / f64::from(SEEDS)).sqrt();
        let allowed = 3.5 * deviation / f64::from(SEEDS).sqrt();
        assert!(
            (mean - truth).abs() < allowed,
            "{mean}, and it is {truth} (allowed {allowed})"
        );
        assert!(deviation < truth * 0.05, "{deviation} of {truth}");
        let inside = f64::from(inside) / f64::from(SEEDS);
        assert!(
            (0.91..=0.99).contains(&inside),
            "{inside} of the intervals hold the truth"
        );
    }

    #[test]
    fn an_estimate_counts_the_copies_of_the_most_frequent_page_content_exactly() {
        let (.., sample) = estimated(2048, 3);
        let most = sample
            .frequent
            .values()
            .max_by_key(|f| f.pages.iter().sum::<u64>());
        let most = most.unwrap();
        assert_eq!((most.of(0), most.of(1), most.of(2)), (6000, 4000, 0));
        assert!(most.kept.len() <= 4096 && !most.is_whole());
        // Copies are kept by their place, so each VM has as large a part of them as of all copies.
        let first = most.kept.iter().filter(|seen| seen.vm == 0).count() as f64;
        let share = first / most.kept.len() as f64;
        assert!((0.55..0.65).contains(&share), "{share}");
    }

    #[test]
    fn the_sample_of_an_estimate_has_either_all_copies_of_a_page_content_or_none() {
        let (.., sample) = estimated(2048, 11);
        let population = population();
        for group in sample.pages.chunk_by(|a, b| a.hash == b.hash) {
            let content = usize::try_from(group[0].page >> 20).unwrap();
            let (a, b) = population[content];
            assert_eq!(group.len() as u64, a + b);
        }
    }
}
