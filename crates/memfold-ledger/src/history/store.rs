//! The database of the history of memory use: stores and reads samples and events (`SQLite`).

use std::fs::{File, Permissions};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rusqlite::{Connection, ToSql, params, params_from_iter};

use super::{Event, HOST_SERIES, Series, Trend, Trends, VM_SERIES};

/// Age in seconds up to which the history keeps fine samples: those that were added one by one.
pub const KEEP_FINE_S: i64 = 24 * 3600;
/// Age in seconds up to which the history keeps coarse samples: means over half an hour.
pub const KEEP_COARSE_S: i64 = 90 * 24 * 3600;
/// Length of a coarse sample, in seconds.
const COARSE_STEP_S: i64 = 1800;
/// Most rows of VMs' samples, fine and coarse. A row takes about 110 bytes; 100 VMs have 720,000
/// rows.
const MOST_VM_ROWS: i64 = 1_000_000;
/// Most events that are kept.
const MOST_EVENTS: i64 = 5000;
/// Size limit of the database file, in pages of 4,096 bytes: 256 MiB.
const MOST_PAGES: i64 = 65_536;
/// Version (`user_version`) of the databases that this code reads.
const VERSION: i64 = 4;
/// Statements that upgrade a database, each from one version to the next, beginning with version 1.
const UPGRADES: [&str; 3] = [
    "ALTER TABLE host ADD COLUMN debt_bytes INTEGER;
    ALTER TABLE host ADD COLUMN debt_absorbable_bytes INTEGER;
    ALTER TABLE host ADD COLUMN lent_bytes INTEGER;
    ALTER TABLE host ADD COLUMN borrowed_bytes INTEGER;",
    "ALTER TABLE vms ADD COLUMN guest_mem_total_bytes INTEGER;
    ALTER TABLE vms ADD COLUMN guest_mem_available_bytes INTEGER;
    ALTER TABLE vms ADD COLUMN guest_anon_pages_bytes INTEGER;
    ALTER TABLE vms ADD COLUMN guest_cached_bytes INTEGER;
    ALTER TABLE vms ADD COLUMN guest_swap_used_bytes INTEGER;
    ALTER TABLE vms ADD COLUMN guest_workingset_refault_file INTEGER;
    ALTER TABLE vms ADD COLUMN guest_psi_some_us INTEGER;",
    "ALTER TABLE vms ADD COLUMN size_bytes INTEGER;
    ALTER TABLE vms ADD COLUMN working_set_bytes INTEGER;
    ALTER TABLE vms ADD COLUMN target_bytes INTEGER;
    ALTER TABLE vms ADD COLUMN working_set_probed_percent INTEGER;",
];

/// Reason why the history cannot be written or read.
#[derive(Debug, thiserror::Error)]
pub enum HistoryError {
    /// The database file cannot be created.
    #[error("cannot open or create the history of memory use {path}")]
    File {
        /// Path of the database file.
        path: PathBuf,
        /// The kernel's error.
        #[source]
        source: std::io::Error,
    },
    /// `SQLite` reported an error.
    #[error("cannot read or write the history of memory use {path}")]
    Database {
        /// Path of the database file.
        path: PathBuf,
        /// The database's error.
        #[source]
        source: rusqlite::Error,
    },
    /// A later version of memfold created the database.
    #[error(
        "the history at {path} has version {version}, this memfold reads versions up to {VERSION}; move the file away"
    )]
    Version {
        /// Path of the database file.
        path: PathBuf,
        /// Version of the database.
        version: i64,
    },
}

/// The open database of the ledger's samples and events.
#[derive(Debug)]
pub struct History {
    path: PathBuf,
    connection: Connection,
    /// Start of the coarse step (in seconds since 1970) whose fine samples are being collected.
    gathering: Option<i64>,
    /// Most rows of VMs' samples, fine and coarse.
    most_vm_rows: i64,
}

fn columns(names: &[&str]) -> String {
    let column = |name: &&str| format!("{name} INTEGER");
    names.iter().map(column).collect::<Vec<_>>().join(", ")
}

fn schema() -> String {
    // Fine samples have step 0, because the time between two of them may vary.
    format!(
        "CREATE TABLE host (step INTEGER NOT NULL, t INTEGER NOT NULL, {}, PRIMARY KEY (step, t)) STRICT, WITHOUT ROWID;
         CREATE TABLE vm_names (id INTEGER PRIMARY KEY, name TEXT UNIQUE NOT NULL) STRICT;
         CREATE TABLE vms (step INTEGER NOT NULL, vm INTEGER NOT NULL, t INTEGER NOT NULL, {}, PRIMARY KEY (step, vm, t)) STRICT, WITHOUT ROWID;
         CREATE INDEX vms_by_time ON vms (step, t);
         CREATE TABLE events (id INTEGER PRIMARY KEY AUTOINCREMENT, t INTEGER NOT NULL, kind TEXT NOT NULL, warning INTEGER NOT NULL,
             vm TEXT, text TEXT NOT NULL) STRICT;
         PRAGMA user_version = {VERSION};",
        columns(&HOST_SERIES),
        columns(&VM_SERIES),
    )
}

fn means(names: &[&str]) -> String {
    let mean = |name: &&str| format!("CAST(ROUND(AVG({name})) AS INTEGER)");
    names.iter().map(mean).collect::<Vec<_>>().join(", ")
}

fn is_full(error: &rusqlite::Error) -> bool {
    error.sqlite_error_code() == Some(rusqlite::ErrorCode::DiskFull)
}

impl History {
    /// Opens the database at `path`, or creates it if there is none. Only the file's owner may read
    /// it (mode 0600).
    pub fn open(path: &Path) -> Result<Self, HistoryError> {
        let file = |source| HistoryError::File {
            path: path.to_owned(),
            source,
        };
        if let Some(directory) = path.parent() {
            std::fs::create_dir_all(directory).map_err(file)?;
        }
        File::options()
            .create(true)
            .append(true)
            .mode(0o600)
            .open(path)
            .and_then(|made| made.set_permissions(Permissions::from_mode(0o600)))
            .map_err(file)?;
        let open = || -> rusqlite::Result<(Connection, i64)> {
            let connection = Connection::open(path)?;
            connection.busy_timeout(std::time::Duration::from_secs(5))?;
            connection.pragma_update(None, "journal_mode", "WAL")?;
            // Losing the last seconds before a power failure does no harm.
            connection.pragma_update(None, "synchronous", "NORMAL")?;
            connection.pragma_update(None, "max_page_count", MOST_PAGES)?;
            connection.pragma_update(None, "journal_size_limit", 4 << 20)?;
            let version: i64 = connection.query_row("PRAGMA user_version", [], |r| r.get(0))?;
            let missing = match usize::try_from(version) {
                Ok(0) => schema(),
                Ok(version) if version <= UPGRADES.len() => {
                    let steps = UPGRADES[version - 1..].concat();
                    format!("{steps} PRAGMA user_version = {VERSION};")
                }
                _ => return Ok((connection, version)),
            };
            connection.execute_batch(&format!("BEGIN IMMEDIATE; {missing} COMMIT;"))?;
            Ok((connection, VERSION))
        };
        let (connection, version) = open().map_err(|source| HistoryError::Database {
            path: path.to_owned(),
            source,
        })?;
        if version != VERSION {
            return Err(HistoryError::Version {
                path: path.to_owned(),
                version,
            });
        }
        Ok(Self {
            path: path.to_owned(),
            connection,
            gathering: None,
            most_vm_rows: MOST_VM_ROWS,
        })
    }

    fn failed(&self, source: rusqlite::Error) -> HistoryError {
        HistoryError::Database {
            path: self.path.clone(),
            source,
        }
    }

    /// Adds a sample of the host and of each VM (by name), and events, which have their own times:
    /// they may be of an earlier sample that could not be written. Deletes
    /// data that is too old or exceeds a limit.
    pub fn add(
        &mut self,
        at_unix_s: i64,
        host: &[Option<i64>; HOST_SERIES.len()],
        vms: &[(String, [Option<i64>; VM_SERIES.len()])],
        events: &[Event],
    ) -> Result<(), HistoryError> {
        let step = at_unix_s - at_unix_s.rem_euclid(COARSE_STEP_S);
        // This comes first, because it frees space. It also handles data of an earlier daemon,
        // which may have run for less than a step.
        if self.gathering.replace(step) != Some(step) {
            // After an error, the next step tries again. This sample is written all the same.
            if let Err(error) = self.make_coarse(step) {
                tracing::warn!(
                    path = %self.path.display(),
                    %error,
                    "cannot summarize samples of the history; free space, or remove the file if it is damaged"
                );
            }
        }
        let mut added = self.add_rows(at_unix_s, host, vms, events);
        // A full disk causes the same error as a full database.
        if added.as_ref().is_err_and(is_full) && self.is_at_its_limit() {
            self.make_room().map_err(|source| self.failed(source))?;
            added = self.add_rows(at_unix_s, host, vms, events);
        }
        added.map_err(|source| self.failed(source))
    }

    fn is_at_its_limit(&self) -> bool {
        let number = |pragma: &str| -> i64 {
            let read = self
                .connection
                .pragma_query_value(None, pragma, |r| r.get(0));
            read.unwrap_or(0)
        };
        number("page_count") * 10 >= number("max_page_count") * 9
    }

    /// Deletes the oldest quarter of the data when the file has reached its size limit.
    fn make_room(&mut self) -> rusqlite::Result<()> {
        tracing::warn!(path = %self.path.display(), "history of memory use is full, so its oldest quarter was deleted; no action is needed");
        let transaction = self.connection.transaction()?;
        for table in ["vms", "host", "events"] {
            transaction.execute(
                &format!(
                    "DELETE FROM {table} WHERE t <= (SELECT t FROM {table} ORDER BY t LIMIT 1 OFFSET (SELECT COUNT(*) / 4 FROM {table}))"
                ),
                [],
            )?;
        }
        transaction.commit()
    }

    fn add_rows(
        &mut self,
        at: i64,
        host: &[Option<i64>; HOST_SERIES.len()],
        vms: &[(String, [Option<i64>; VM_SERIES.len()])],
        events: &[Event],
    ) -> rusqlite::Result<()> {
        let transaction = self.connection.transaction()?;
        {
            let marks = |n: usize| vec!["?"; n].join(", ");
            // If two samples have the same second, the later one counts.
            let mut add = transaction.prepare_cached(&format!(
                "INSERT OR REPLACE INTO host VALUES ({})",
                marks(HOST_SERIES.len() + 2)
            ))?;
            add.execute(params_from_iter([Some(0), Some(at)].iter().chain(host)))?;
            let mut name = transaction
                .prepare_cached("INSERT INTO vm_names (name) VALUES (?) ON CONFLICT DO NOTHING")?;
            let mut number =
                transaction.prepare_cached("SELECT id FROM vm_names WHERE name = ?")?;
            let mut add = transaction.prepare_cached(&format!(
                "INSERT OR REPLACE INTO vms VALUES ({})",
                marks(VM_SERIES.len() + 3)
            ))?;
            for (vm, values) in vms {
                name.execute([vm])?;
                let id: i64 = number.query_row([vm], |r| r.get(0))?;
                let key = [0, id, at].map(Some);
                add.execute(params_from_iter(key.iter().chain(values)))?;
            }
            let mut add = transaction.prepare_cached(
                "INSERT INTO events (t, kind, warning, vm, text) VALUES (?, ?, ?, ?, ?)",
            )?;
            for event in events {
                let at = event.at_unix_s;
                add.execute(params![at, event.kind, event.warning, event.vm, event.text])?;
            }
        }
        transaction.commit()
    }

    /// Computes the means of all complete steps before `now_step` that have no mean yet, and
    /// deletes data that is too old. Samples with a time in the future (the clock was ahead) stay
    /// until their time comes, and do no harm.
    fn make_coarse(&mut self, now_step: i64) -> rusqlite::Result<()> {
        let transaction = self.connection.transaction()?;
        let bucket = format!("t - t % {COARSE_STEP_S}");
        for (table, key, names) in [
            ("host", "", &HOST_SERIES[..]),
            ("vms", "vm, ", &VM_SERIES[..]),
        ] {
            transaction.execute(
                &format!(
                    "INSERT OR IGNORE INTO {table} SELECT {COARSE_STEP_S}, {key}{bucket} AS bucket, {} FROM {table}
                     WHERE step = 0 AND t < ?1 AND {bucket} > (SELECT IFNULL(MAX(t), 0) FROM {table} WHERE step = {COARSE_STEP_S} AND t < ?1)
                     GROUP BY {key}bucket",
                    means(names)
                ),
                [now_step],
            )?;
            for (step, keep) in [(0, KEEP_FINE_S), (COARSE_STEP_S, KEEP_COARSE_S)] {
                transaction.execute(
                    &format!("DELETE FROM {table} WHERE step = ? AND t < ?"),
                    [step, now_step - keep],
                )?;
            }
        }
        let rows: i64 = transaction.query_row("SELECT COUNT(*) FROM vms", [], |r| r.get(0))?;
        if rows > self.most_vm_rows {
            transaction.execute(
                "DELETE FROM vms WHERE (step, vm, t) IN (SELECT step, vm, t FROM vms ORDER BY t LIMIT ?)",
                [rows - self.most_vm_rows],
            )?;
        }
        transaction.execute(
            "DELETE FROM vm_names WHERE id NOT IN (SELECT DISTINCT vm FROM vms)",
            [],
        )?;
        transaction.execute(
            "DELETE FROM events WHERE id <= (SELECT MAX(id) FROM events) - ?",
            [MOST_EVENTS],
        )?;
        transaction.commit()
    }

    /// Returns the host's figures from `from` to `now` (seconds since 1970), averaged over about
    /// `points` steps. If `from` is more than [`KEEP_FINE_S`] before `now`, coarse samples are
    /// used.
    pub fn host(&self, now: i64, from: i64, points: i64) -> Result<Series, HistoryError> {
        self.series("host", "", &[], &HOST_SERIES, (now, from), points)
            .map_err(|source| self.failed(source))
    }

    /// Returns a VM's figures from `from` to `now` (seconds since 1970), averaged over about
    /// `points` steps. For an unknown VM, the result is empty.
    pub fn vm(&self, name: &str, now: i64, from: i64, points: i64) -> Result<Series, HistoryError> {
        let condition = "AND vm = (SELECT id FROM vm_names WHERE name = ?5)";
        self.series("vms", condition, &[&name], &VM_SERIES, (now, from), points)
            .map_err(|source| self.failed(source))
    }

    fn series(
        &self,
        table: &str,
        condition: &str,
        more: &[&dyn ToSql],
        names: &[&str],
        (now, from): (i64, i64),
        points: i64,
    ) -> rusqlite::Result<Series> {
        let step = if now - from <= KEEP_FINE_S {
            0
        } else {
            COARSE_STEP_S
        };
        let bucket = ((now - from) / points.max(1)).max(1).max(step);
        let mut select = self.connection.prepare_cached(&format!(
            "SELECT t - t % ?1 AS bucket, {} FROM {table} WHERE step = ?2 AND t >= ?3 AND t <= ?4 {condition} GROUP BY bucket ORDER BY bucket",
            means(names)
        ))?;
        let mut found = Series {
            step_s: bucket,
            names: names.iter().map(|&name| name.to_owned()).collect(),
            values: vec![Vec::new(); names.len()],
            ..Series::default()
        };
        let values: [&dyn ToSql; 4] = [&bucket, &step, &from, &now];
        let mut rows = select.query(params_from_iter(values.iter().chain(more)))?;
        while let Some(row) = rows.next()? {
            found.t.push(row.get(0)?);
            for (at, values) in found.values.iter_mut().enumerate() {
                values.push(row.get(at + 1)?);
            }
        }
        Ok(found)
    }

    /// Returns the PSS of all VMs from `from` to `now` (seconds since 1970), averaged over at most
    /// `points` steps. The steps are the same for all VMs.
    pub fn trends(&self, now: i64, from: i64, points: i64) -> Result<Trends, HistoryError> {
        // Samples have a resolution of one second.
        let points = points.min(now - from).max(1);
        let bucket = ((now - from) / points).max(1);
        let read = || -> rusqlite::Result<Trends> {
            let mut select = self.connection.prepare_cached(
                "SELECT name, MIN((t - ?2) / ?1, ?4 - 1) AS point, CAST(ROUND(AVG(pss_bytes)) AS INTEGER)
                 FROM vms JOIN vm_names ON vms.vm = vm_names.id
                 WHERE step = 0 AND t >= ?2 AND t <= ?3 GROUP BY name, point ORDER BY name, point",
            )?;
            let mut rows = select.query([bucket, from, now, points])?;
            let mut vms: Vec<Trend> = Vec::new();
            while let Some(row) = rows.next()? {
                let (name, point, value): (String, usize, i64) =
                    (row.get(0)?, row.get(1)?, row.get(2)?);
                if vms.last().is_none_or(|last| last.name != name) {
                    let pss_bytes = (0..points).map(|_| None).collect();
                    vms.push(Trend { name, pss_bytes });
                }
                let of = vms.last_mut().map(|last| &mut last.pss_bytes);
                if let Some(at) = of.and_then(|all| all.get_mut(point)) {
                    *at = Some(value);
                }
            }
            Ok(Trends {
                step_s: bucket,
                vms,
            })
        };
        read().map_err(|source| self.failed(source))
    }

    /// Returns the events after the one with the number `after`, oldest first, at most `count`,
    /// each with its number. The numbers of all events ever recorded are consecutive.
    pub fn events_after(&self, after: i64, count: i64) -> Result<Vec<(i64, Event)>, HistoryError> {
        let read = || -> rusqlite::Result<Vec<(i64, Event)>> {
            let mut select = self.connection.prepare_cached(
                "SELECT t, kind, warning, vm, text, id FROM events WHERE id > ? ORDER BY id LIMIT ?",
            )?;
            let rows = select.query_map([after, count], |row| Ok((row.get(5)?, event(row)?)))?;
            rows.collect()
        };
        read().map_err(|source| self.failed(source))
    }

    /// Returns the number of the newest event; 0 if there is none.
    pub fn last_event(&self) -> Result<i64, HistoryError> {
        let select = "SELECT COALESCE(MAX(id), 0) FROM events";
        let read = self.connection.query_row(select, [], |row| row.get(0));
        read.map_err(|source| self.failed(source))
    }

    /// Returns the last `count` events, newest first.
    pub fn events(&self, count: i64) -> Result<Vec<Event>, HistoryError> {
        let read = || -> rusqlite::Result<Vec<Event>> {
            let mut select = self.connection.prepare_cached(
                "SELECT t, kind, warning, vm, text FROM events ORDER BY id DESC LIMIT ?",
            )?;
            let rows = select.query_map([count], event)?;
            rows.collect()
        };
        read().map_err(|source| self.failed(source))
    }
}

/// Reads an event from a row that begins with its time, kind, warning, VM and text.
fn event(row: &rusqlite::Row<'_>) -> rusqlite::Result<Event> {
    Ok(Event {
        at_unix_s: row.get(0)?,
        kind: row.get(1)?,
        warning: row.get(2)?,
        vm: row.get(3)?,
        text: row.get(4)?,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: i64 = 24 * 3600;
    /// Start time of the tests' samples: a multiple of the coarse step.
    const BEGIN: i64 = 1_800_000_000;

    fn open() -> (tempfile::TempDir, History) {
        let directory = tempfile::tempdir().unwrap();
        let history = History::open(&directory.path().join("records/history.sqlite")).unwrap();
        (directory, history)
    }

    fn host(value: i64) -> [Option<i64>; HOST_SERIES.len()] {
        let mut values = [Some(0); HOST_SERIES.len()];
        values[0] = Some(value);
        values
    }

    fn vm(name: &str, value: i64) -> (String, [Option<i64>; VM_SERIES.len()]) {
        let mut values = [Some(0); VM_SERIES.len()];
        values[2] = Some(value);
        (name.to_owned(), values)
    }

    fn count(history: &History, sql: &str) -> i64 {
        let connection = &history.connection;
        connection.query_row(sql, [], |r| r.get(0)).unwrap()
    }

    #[test]
    fn when_the_ledger_history_is_full_its_oldest_samples_are_deleted_for_new_ones() {
        let (directory, mut history) = open();
        // One hundred pages are 400 KiB.
        let most = 100;
        let set = history
            .connection
            .pragma_update(None, "max_page_count", most);
        set.unwrap();
        let vms: Vec<_> = (0..50).map(|n| vm(&format!("vm-{n}"), n)).collect();
        let mut at = BEGIN;
        for _ in 0..300 {
            history.add(at, &host(at), &vms, &[]).unwrap();
            at += 5;
        }
        assert!(count(&history, "PRAGMA page_count") <= most);
        let left = count(&history, "SELECT COUNT(*) FROM vms");
        assert!((500..15_000).contains(&left), "{left}");
        let newest = count(&history, "SELECT MAX(t) FROM vms");
        assert_eq!(newest, at - 5);
        assert!(count(&history, "SELECT MIN(t) FROM vms") > BEGIN);
        let size = |name: &str| {
            let path = directory.path().join("records").join(name);
            path.metadata().map_or(0, |facts| facts.len())
        };
        assert!(size("history.sqlite") <= 100 * 4096);
        assert!(size("history.sqlite-wal") <= 8 << 20);
    }

    #[test]
    fn a_new_daemon_deletes_expired_samples_of_the_ledger_history_of_the_previous_daemon() {
        let (directory, mut history) = open();
        history.add(BEGIN, &host(1), &[vm("web", 1)], &[]).unwrap();
        drop(history);
        let path = directory.path().join("records/history.sqlite");
        let mut history = History::open(&path).unwrap();
        let later = BEGIN + 2 * DAY;
        history.add(later, &host(2), &[], &[]).unwrap();
        let fine = "SELECT COUNT(*) FROM vms WHERE step = 0";
        assert_eq!(count(&history, fine), 0);
        assert_eq!(count(&history, "SELECT COUNT(*) FROM vms"), 1);
    }

    #[test]
    fn if_there_are_more_vm_samples_than_the_limit_the_oldest_are_deleted_first() {
        let (_directory, mut history) = open();
        history.add(BEGIN, &host(1), &[vm("old", 1)], &[]).unwrap();
        history.most_vm_rows = 10_000;
        let rows = history.most_vm_rows + 500;
        let fill = format!(
            "WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < {rows})
             INSERT INTO vms (step, vm, t) SELECT 0, 2 + i % 1000, {BEGIN} + 1 + i / 1000 FROM n"
        );
        history.connection.execute_batch(&fill).unwrap();
        let later = BEGIN + COARSE_STEP_S;
        history.add(later, &host(1), &[], &[]).unwrap();
        let left = count(&history, "SELECT COUNT(*) FROM vms");
        assert_eq!(left, history.most_vm_rows);
        let old = "SELECT COUNT(*) FROM vms WHERE step = 0 AND vm = 1";
        assert_eq!(count(&history, old), 0);
    }

    #[test]
    fn if_fewer_points_are_requested_than_ledger_samples_exist_means_are_returned() {
        let (_directory, mut history) = open();
        for n in 0..60 {
            let at = BEGIN + n * 30;
            history
                .add(at, &host(-n), &[vm("web", n), vm("db", 7)], &[])
                .unwrap();
        }
        let now = BEGIN + 1800;
        let all = history.host(now, BEGIN, 10_000).unwrap();
        assert_eq!(
            (all.t.len(), all.t[0], all.t[59]),
            (60, BEGIN, BEGIN + 1770)
        );
        assert_eq!(all.names[0], "vms_bytes");
        assert_eq!(all.values[0][59], Some(-59));
        let few = history.vm("web", now, BEGIN, 6).unwrap();
        assert_eq!((few.step_s, few.t.len()), (300, 6));
        assert_eq!(few.names[2], "folded_bytes");
        let last = few.values[2][5].unwrap();
        assert!((54..=55).contains(&last), "mean of 50 to 59: {last}");
        assert!(history.vm("ghost", now, BEGIN, 6).unwrap().t.is_empty());
    }

    #[test]
    fn the_ledgers_trends_contain_every_vm_with_the_requested_number_of_points() {
        let (_directory, mut history) = open();
        for n in 0..60 {
            let mut of = vm("web", 0);
            let pss = VM_SERIES.iter().position(|name| *name == "pss_bytes");
            of.1[pss.unwrap()] = Some(n);
            let all = [of, vm("db", 0)];
            history.add(BEGIN + n * 30, &host(0), &all, &[]).unwrap();
        }
        let found = history.trends(BEGIN + 1800, BEGIN, 6).unwrap();
        let names: Vec<&str> = found.vms.iter().map(|v| v.name.as_str()).collect();
        assert_eq!(names, ["db", "web"]);
        assert_eq!(found.vms[0].pss_bytes, [Some(0); 6]);
        assert_eq!(found.vms[1].pss_bytes.len(), 6);
        assert!(found.vms[1].pss_bytes.is_sorted());
    }

    #[test]
    fn if_a_vm_is_newer_than_the_requested_time_its_memory_trend_begins_with_empty_points() {
        let (_directory, mut history) = open();
        let all = [vm("old", 0), vm("young", 0)];
        for n in 0..=120 {
            let there = if n < 116 { &all[..1] } else { &all };
            history.add(BEGIN + n * 30, &host(0), there, &[]).unwrap();
        }
        let points = |wanted| history.trends(BEGIN + 3600, BEGIN, wanted).unwrap().vms;
        let found = points(40);
        assert_eq!(found[0].pss_bytes, [Some(0); 40]);
        let (before, young) = found[1].pss_bytes.split_at(38);
        assert_eq!((before, young), (&[None; 38][..], &[Some(0); 2][..]));
        // If the points do not divide the time evenly, the last point covers the rest.
        assert_eq!(points(70)[1].pss_bytes.len(), 70);
        // If samples are rarer than points, some points have no value.
        let gaps = &history.trends(BEGIN + 3600, BEGIN, 240).unwrap().vms[0].pss_bytes;
        assert_eq!((gaps[0], gaps[1], gaps[2]), (Some(0), None, Some(0)));
        let few = history.trends(BEGIN + 3600, BEGIN + 3597, 40).unwrap();
        assert_eq!(few.vms[0].pss_bytes, [None, None, Some(0)]);
    }

    #[test]
    fn ledger_samples_are_deleted_after_a_day_and_their_half_hourly_means_after_90_days() {
        let (_directory, mut history) = open();
        let every = 600;
        for n in 0..(100 * DAY / every) {
            history
                .add(BEGIN + n * every, &host(5), &[vm("web", 9)], &[])
                .unwrap();
        }
        let now = BEGIN + 100 * DAY;
        let fine = count(&history, "SELECT COUNT(*) FROM vms WHERE step = 0");
        assert!((144..=150).contains(&fine), "{fine}");
        let coarse = count(&history, "SELECT COUNT(*) FROM vms WHERE step > 0");
        assert!((4310..=4325).contains(&coarse), "{coarse}");
        let long = history.vm("web", now, now - 90 * DAY, 2000).unwrap();
        assert!(
            long.t.len() > 1000 && long.t.len() <= 2001,
            "{}",
            long.t.len()
        );
        assert!(long.values[2].iter().all(|&value| value == Some(9)));
        assert!(long.t[0] < now - 89 * DAY);
    }

    #[test]
    fn after_the_clock_was_set_back_ledger_samples_from_the_future_are_replaced() {
        let (_directory, mut history) = open();
        let add = |history: &mut History, at, value| {
            let vms = [vm("web", value)];
            history.add(at, &host(value), &vms, &[]).unwrap();
        };
        for n in 0..10 {
            add(&mut history, BEGIN + DAY + n * 600, 7);
        }
        // The clock is set right again.
        for n in 0..10 {
            add(&mut history, BEGIN + n * 600, 5);
        }
        let now = BEGIN + 9 * 600;
        let fine = history.host(now, BEGIN, 100).unwrap();
        assert_eq!(fine.t.len(), 10);
        assert!(fine.values[0].iter().all(|&value| value == Some(5)));
        let coarse = history.vm("web", now, now - 2 * DAY, 1000).unwrap();
        assert_eq!(coarse.t.len(), 3);
        assert!(coarse.values[2].iter().all(|&value| value == Some(5)));
        let trends = history.trends(now, BEGIN, 9).unwrap();
        assert_eq!(trends.vms[0].pss_bytes, [Some(0); 9]);
    }

    #[test]
    fn a_restarted_daemon_completes_the_mean_samples_that_the_previous_daemon_began() {
        let (directory, mut history) = open();
        history.add(BEGIN, &host(1), &[], &[]).unwrap();
        drop(history);
        let path = directory.path().join("records/history.sqlite");
        let mut history = History::open(&path).unwrap();
        history.add(BEGIN + 4000, &host(3), &[], &[]).unwrap();
        history.add(BEGIN + 6000, &host(3), &[], &[]).unwrap();
        let coarse = count(&history, "SELECT COUNT(*) FROM host WHERE step > 0");
        assert_eq!(coarse, 2);
        let mode = std::fs::metadata(&path).unwrap().permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }

    #[test]
    fn samples_and_events_are_written_although_earlier_samples_cannot_be_summarized() {
        let (_directory, mut history) = open();
        history.add(BEGIN, &host(1), &[], &[]).unwrap();
        let refuse = format!(
            "CREATE TRIGGER refuse BEFORE INSERT ON host WHEN new.step = {COARSE_STEP_S} BEGIN SELECT RAISE(FAIL, 'no'); END"
        );
        history.connection.execute_batch(&refuse).unwrap();
        let event = Event {
            at_unix_s: BEGIN,
            kind: "vm".into(),
            warning: false,
            vm: None,
            text: "once".into(),
        };
        let means = |history: &History| {
            let sql = format!("SELECT COUNT(*) FROM host WHERE step = {COARSE_STEP_S}");
            count(history, &sql)
        };
        let later = BEGIN + COARSE_STEP_S;
        history.add(later, &host(2), &[], &[event]).unwrap();
        assert_eq!(history.events(10).unwrap().len(), 1);
        assert_eq!(count(&history, "SELECT COUNT(*) FROM host"), 2);
        assert_eq!(means(&history), 0);
        history
            .connection
            .execute_batch("DROP TRIGGER refuse")
            .unwrap();
        history
            .add(later + COARSE_STEP_S, &host(3), &[], &[])
            .unwrap();
        assert_eq!(means(&history), 2);
    }

    #[test]
    fn the_list_of_past_events_is_bounded_and_begins_with_the_newest() {
        let (_directory, mut history) = open();
        let event = |n: i64| Event {
            at_unix_s: BEGIN + n,
            kind: "vm".into(),
            warning: n % 2 == 0,
            vm: None,
            text: n.to_string(),
        };
        for n in 0..6000 {
            history.add(BEGIN + n, &host(0), &[], &[event(n)]).unwrap();
        }
        let last = history.events(2).unwrap();
        assert_eq!(
            (last[0].text.as_str(), last[0].at_unix_s),
            ("5999", BEGIN + 5999)
        );
        assert!(!last[0].warning && last[1].warning);
        let all = count(&history, "SELECT COUNT(*) FROM events");
        assert!(all <= MOST_EVENTS + 1800, "{all}");
        // The number of an event tells which events follow it.
        assert_eq!(history.last_event().unwrap(), 6000);
        let after: Vec<(i64, String)> = history
            .events_after(5998, 10)
            .unwrap()
            .into_iter()
            .map(|(number, event)| (number, event.text))
            .collect();
        assert_eq!(after, [(5999, "5998".into()), (6000, "5999".into())]);
        assert_eq!(history.events_after(0, 1).unwrap()[0].0, 6001 - all);
    }

    #[test]
    fn a_ledger_history_of_an_older_version_is_upgraded_and_keeps_its_samples() {
        /// Number of the host's figures in version 1.
        const OLD: usize = 16;
        /// Number of a VM's figures in version 2.
        const OLD_VM: usize = 8;
        let (directory, mut history) = open();
        let path = directory.path().join("records/history.sqlite");
        history.add(BEGIN, &host(0), &[vm("web", 4)], &[]).unwrap();
        let connection = &history.connection;
        // Makes the tables as version 1 did.
        let names = HOST_SERIES[OLD..].iter().map(|name| ("host", name));
        for (table, name) in names.chain(VM_SERIES[OLD_VM..].iter().map(|name| ("vms", name))) {
            let drop = format!("ALTER TABLE {table} DROP COLUMN {name}");
            connection.execute_batch(&drop).unwrap();
        }
        let values = vec!["7"; OLD].join(", ");
        let old =
            format!("REPLACE INTO host VALUES (0, {BEGIN}, {values}); PRAGMA user_version = 1;");
        connection.execute_batch(&old).unwrap();
        drop(history);

        let mut history = History::open(&path).unwrap();
        let mut now = host(1);
        now[HOST_SERIES.len() - 1] = Some(9);
        let of_vm = vm("web", 6);
        history.add(BEGIN + 60, &now, &[of_vm], &[]).unwrap();
        let of_vm = history.vm("web", BEGIN + 60, BEGIN, 100).unwrap();
        assert_eq!(of_vm.values[2], [Some(4), Some(6)]);
        assert_eq!(of_vm.values[OLD_VM], [None, Some(0)]);
        let found = history.host(BEGIN + 60, BEGIN, 100).unwrap();
        assert_eq!(found.t.len(), 2);
        assert_eq!(found.values[OLD - 1], [Some(7), Some(0)]);
        assert_eq!(found.values[HOST_SERIES.len() - 1], [None, Some(9)]);
        drop(history);
        assert_eq!(
            count(&History::open(&path).unwrap(), "PRAGMA user_version"),
            VERSION
        );
    }

    #[test]
    fn a_ledger_history_of_a_later_version_is_refused() {
        let (directory, history) = open();
        history
            .connection
            .pragma_update(None, "user_version", 9)
            .unwrap();
        drop(history);
        let path = directory.path().join("records/history.sqlite");
        let error = History::open(&path).unwrap_err().to_string();
        assert!(error.contains("version 9"), "{error}");
    }
}
