//! The lease registry that one daemon serves to all hosts, stored in an `SQLite` database.
//!
//! Times in the database are milliseconds since the boot of the daemon's host. So hosts need not
//! agree on the time, and setting the clock changes nothing. `BEGIN IMMEDIATE` takes the database's
//! only write lock before the first read, so values that a transaction has read are still valid
//! when it writes.

use std::collections::HashMap;
use std::fmt;
use std::fs::Permissions;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use memfold_vm::boot_id;
use rusqlite::{
    Connection, OptionalExtension, Params, Row, Transaction, TransactionBehavior, params,
};
use rustix::time::{ClockId, clock_gettime};
use serde::de::DeserializeOwned;

use super::endpoint::Endpoint;
use super::files;
use super::lease::{
    Durability, FORGOTTEN, Incarnation, Lease, LeaseId, LeaseState, LenderId, LenderView, Picture,
    ms,
};
use super::registry::{Offer, Registry, Want};
use super::registry_error::{
    RegistryError, Result, check_bytes, check_leases, check_name, check_ttl, no_lease, value,
    wrong_state,
};

/// How long to wait for the transaction of another client.
const BUSY: Duration = Duration::from_secs(5);

/// Version (`user_version`) of databases that this code can read.
const VERSION: i64 = 3;

/// How long lenders and borrowers have to report again after a reboot of the registry's host.
const AFTER_BOOT: Duration = Duration::from_secs(60);

const SCHEMA: &str = "
CREATE TABLE lenders (
    host TEXT PRIMARY KEY,
    incarnation INTEGER NOT NULL,
    bytes INTEGER NOT NULL,
    heard_ms INTEGER NOT NULL,
    expires_ms INTEGER NOT NULL
) STRICT;
CREATE TABLE leases (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    host TEXT NOT NULL,
    incarnation INTEGER NOT NULL,
    borrower TEXT NOT NULL,
    vm TEXT NOT NULL,
    bytes INTEGER NOT NULL,
    durability TEXT NOT NULL,
    state TEXT NOT NULL,
    expires_ms INTEGER NOT NULL,
    recall_ms INTEGER,
    endpoint TEXT
) STRICT;
CREATE INDEX leases_of ON leases (host);
PRAGMA user_version = 1;
";

/// Database schema, version 2: the boot whose clock all times refer to.
const SCHEMA_2: &str = "
CREATE TABLE clock (boot TEXT NOT NULL) STRICT;
PRAGMA user_version = 2;
";

/// Database schema, version 3: the size of the whole swap disk; 0 for leases of older versions.
const SCHEMA_3: &str = "
ALTER TABLE leases ADD COLUMN disk_bytes INTEGER NOT NULL DEFAULT 0;
PRAGMA user_version = 3;
";

const LEASE: &str = "SELECT id, host, incarnation, borrower, vm, bytes, state, expires_ms, recall_ms, durability, disk_bytes FROM leases";

const LENDERS: &str = "SELECT host, incarnation, bytes, heard_ms, expires_ms, (SELECT COALESCE(SUM(bytes), 0) FROM leases WHERE leases.host = lenders.host) FROM lenders ORDER BY host";

type Clock = Arc<dyn Fn() -> i64 + Send + Sync>;

/// A registry of leases in an `SQLite` database file.
pub struct SqliteRegistry {
    path: PathBuf,
    connection: Mutex<Connection>,
    clock: Clock,
}

impl fmt::Debug for SqliteRegistry {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("SqliteRegistry").field(&self.path).finish()
    }
}

impl SqliteRegistry {
    /// Opens the registry's database, and creates it if it does not exist. Only the file's owner
    /// can read it, because it contains keys.
    ///
    /// # Errors
    /// Fails if the file cannot be used, or has another version.
    pub fn open(path: &Path) -> Result<Self> {
        Self::open_at(path, Arc::new(now_ms), &boot_id())
    }

    /// Opens the registry's database with another clock, for tests. `clock` returns milliseconds
    /// since the boot with ID `boot`.
    pub fn open_at(path: &Path, clock: Clock, boot: &str) -> Result<Self> {
        let open = || -> Result<Connection, Failure> {
            // The file is created before `SQLite` opens it, so that no other user can ever read it.
            let file = std::fs::File::options()
                .create(true)
                .append(true)
                .mode(0o600)
                .open(path)?;
            file.set_permissions(Permissions::from_mode(0o600))?;
            let mut connection = Connection::open(path)?;
            connection.busy_timeout(BUSY)?;
            connection.pragma_update(None, "journal_mode", "WAL")?;
            // After a power failure, a lease must not return in an older state, because its bytes
            // may belong to another borrower by then.
            connection.pragma_update(None, "synchronous", "FULL")?;
            connection.set_transaction_behavior(TransactionBehavior::Immediate);
            let transaction = connection.transaction()?;
            let version: i64 = transaction.query_row("PRAGMA user_version", [], |r| r.get(0))?;
            if version > VERSION {
                return Err(Failure::Other(format!(
                    "the database has version {version}, this memfold reads {VERSION}; use the memfold that created it, or another --state"
                )));
            }
            if version == 0 {
                transaction.execute_batch(SCHEMA)?;
                // A lender may still export leases of a database that was lost. Their numbers must
                // not be used again, so the first number is random.
                transaction.execute(
                    "INSERT INTO sqlite_sequence (name, seq) VALUES ('leases', ?1)",
                    [u32::from_le_bytes(files::random()?) >> 1],
                )?;
            }
            if version < 2 {
                transaction.execute_batch(SCHEMA_2)?;
            }
            if version < 3 {
                transaction.execute_batch(SCHEMA_3)?;
            }
            set_clock(&transaction, boot, clock())?;
            transaction.commit()?;
            Ok(connection)
        };
        let connection = open().map_err(|failure| failure.at(path))?;
        Ok(Self {
            path: path.to_owned(),
            connection: Mutex::new(connection),
            clock,
        })
    }

    /// Runs one transaction.
    fn once<T>(&self, work: impl FnOnce(&Now<'_>) -> Result<T, Failure>) -> Result<T> {
        let connection = self.connection.lock();
        let mut connection = connection.unwrap_or_else(PoisonError::into_inner);
        let run = || {
            let (sql, ms) = (connection.transaction()?, (self.clock)());
            let now = Now { sql, ms };
            let done = work(&now)?;
            now.sql.commit()?;
            Ok(done)
        };
        run().map_err(|failure: Failure| failure.at(&self.path))
    }
}

/// A transaction, and the time in milliseconds at which it began.
struct Now<'a> {
    sql: Transaction<'a>,
    ms: i64,
}

impl Now<'_> {
    fn change(&self, statement: &str, params: impl Params) -> Result<(), Failure> {
        self.sql.execute(statement, params)?;
        Ok(())
    }

    /// Removes lenders that will not return, and their leases, which only their lender would end.
    /// Leases that are still renewed stay: their borrowers may have bytes there. Other leases have
    /// no export any more, because a lender that is cut off ends its exports at their deadlines.
    /// The time of a lease counts from its deadline, and both times from the host's last boot.
    fn forget(&self) -> Result<(), Failure> {
        let before = self.ms.saturating_sub(stored(ms(FORGOTTEN)));
        self.change(
            "DELETE FROM leases WHERE expires_ms < ?1 AND NOT EXISTS (SELECT 1 FROM lenders WHERE lenders.host = leases.host AND lenders.heard_ms >= ?1)",
            [before],
        )?;
        self.change(
            "DELETE FROM lenders WHERE heard_ms < ?1 AND NOT EXISTS (SELECT 1 FROM leases WHERE leases.host = lenders.host)",
            [before],
        )
    }

    /// Returns the time after `ms` milliseconds.
    fn after(&self, ms: u64) -> i64 {
        self.ms.saturating_add(stored(ms))
    }

    /// Returns the milliseconds until a time; 0 if it has passed.
    fn left(&self, until: i64) -> u64 {
        u64::try_from(until.saturating_sub(self.ms)).unwrap_or(0)
    }

    fn read_lease(&self, row: &Row<'_>) -> rusqlite::Result<Lease> {
        let recall: Option<i64> = row.get(8)?;
        Ok(Lease {
            durability: named(row, 9)?,
            id: LeaseId(number(row, 0)?),
            lender: lender(row, 1)?,
            borrower: row.get(3)?,
            vm: row.get(4)?,
            bytes: number(row, 5)?,
            disk_bytes: number(row, 10)?,
            state: named(row, 6)?,
            left_ms: self.left(row.get(7)?),
            recall_ms: recall.map(|until| self.left(until)),
        })
    }

    fn find(
        &self,
        id: LeaseId,
        who: &str,
        is_theirs: impl FnOnce(&Lease) -> bool,
    ) -> Result<Lease, Failure> {
        let query = format!("{LEASE} WHERE id = ?1");
        let read = |row: &Row<'_>| self.read_lease(row);
        let lease = self.sql.query_row(&query, [stored(id.0)], read);
        let theirs = lease.optional()?.filter(is_theirs);
        Ok(theirs.ok_or_else(|| no_lease(id, who))?)
    }

    fn of_borrower(&self, id: LeaseId, borrower: &str) -> Result<Lease, Failure> {
        self.find(id, borrower, |lease| lease.borrower == borrower)
    }

    fn of_lender(&self, id: LeaseId, lender: &LenderId) -> Result<Lease, Failure> {
        self.find(id, &lender.host, |lease| lease.lender == *lender)
    }

    /// Returns the number for the next lease. `SQLite` keeps the largest number so far, also of
    /// leases that were deleted (`AUTOINCREMENT`).
    fn next_id(&self) -> Result<LeaseId, Failure> {
        let last = "SELECT COALESCE(MAX(seq), 0) FROM sqlite_sequence WHERE name = 'leases'";
        let last = self.sql.query_row(last, [], |row| number(row, 0))?;
        Ok(LeaseId::after(last)?)
    }

    /// Returns how many leases a borrower holds, and has not released.
    fn held_by(&self, borrower: &str) -> rusqlite::Result<usize> {
        let query = "SELECT COUNT(*) FROM leases WHERE borrower = ?1 AND state <> ?2";
        let released = LeaseState::Released.to_string();
        self.sql
            .query_row(query, [borrower, &released], |row| count(row, 0))
    }

    /// Returns how many leases each lender has that have not ended, by host name.
    fn leases_of_lenders(&self) -> rusqlite::Result<HashMap<String, usize>> {
        let query = "SELECT host, COUNT(*) FROM leases GROUP BY host";
        let mut query = self.sql.prepare(query)?;
        let counts = query.query_map([], |row| Ok((row.get(0)?, count(row, 1)?)))?;
        counts.collect()
    }

    /// Returns all lenders, sorted by name.
    fn lenders(&self) -> rusqlite::Result<Vec<LenderView>> {
        let mut query = self.sql.prepare(LENDERS)?;
        let lenders = query.query_map([], |row| {
            let heard: i64 = row.get(3)?;
            Ok(LenderView {
                lender: lender(row, 0)?,
                offered_bytes: number(row, 2)?,
                lent_bytes: number(row, 5)?,
                silent_ms: u64::try_from(self.ms.saturating_sub(heard)).unwrap_or(0),
                left_ms: self.left(row.get(4)?),
            })
        })?;
        lenders.collect()
    }
}

/// Reads a number of rows.
fn count(row: &Row<'_>, column: usize) -> rusqlite::Result<usize> {
    Ok(usize::try_from(number(row, column)?).unwrap_or(usize::MAX))
}

fn now_ms() -> i64 {
    let now = clock_gettime(ClockId::Boottime);
    now.tv_sec
        .saturating_mul(1000)
        .saturating_add(now.tv_nsec / 1_000_000)
}

/// Makes all times relative to the present boot. Times of another boot are meaningless, so every
/// lease begins anew: it holds as long as its borrower assumes, and a recalled lease is recalled
/// with at least [`AFTER_BOOT`], and with the time to copy the disk if there is no other copy.
fn set_clock(transaction: &Transaction<'_>, boot: &str, now: i64) -> rusqlite::Result<()> {
    let known = transaction.query_row("SELECT boot FROM clock", [], |row| row.get(0));
    let known: Option<String> = known.optional()?;
    if known.as_deref() == Some(boot) {
        return Ok(());
    }
    transaction.execute("DELETE FROM clock", [])?;
    transaction.execute("INSERT INTO clock VALUES (?1)", [boot])?;
    // No lender has reported since the boot, so nobody can borrow from them yet.
    transaction.execute("UPDATE lenders SET heard_ms = ?1, expires_ms = ?1", [now])?;
    let mut query = transaction.prepare("SELECT id, durability, bytes, disk_bytes FROM leases")?;
    let leases = query.query_map([], |row| {
        let (durability, bytes): (Durability, u64) = (named(row, 1)?, number(row, 2)?);
        let id: i64 = row.get(0)?;
        Ok((id, durability, bytes.max(number(row, 3)?)))
    })?;
    let leases: Vec<(i64, Durability, u64)> = leases.collect::<rusqlite::Result<_>>()?;
    for (id, durability, bytes) in leases {
        let after = |time: Duration| now.saturating_add(stored(ms(time)));
        let expires = after(durability.lease_time(bytes));
        let recall = after(durability.time_to_give_back(bytes).max(AFTER_BOOT));
        transaction.execute(
            "UPDATE leases SET expires_ms = ?2, recall_ms = IIF(recall_ms IS NULL, NULL, ?3) WHERE id = ?1",
            [id, expires, recall],
        )?;
    }
    Ok(())
}

#[derive(Debug, thiserror::Error)]
enum Failure {
    #[error(transparent)]
    Refused(#[from] RegistryError),
    #[error(transparent)]
    Sqlite(#[from] rusqlite::Error),
    #[error(transparent)]
    File(#[from] std::io::Error),
    #[error("{0}")]
    Other(String),
}

impl Failure {
    fn at(self, database: &Path) -> RegistryError {
        match self {
            Self::Refused(error) => error,
            other => RegistryError::Unusable {
                place: database.display().to_string(),
                why: other.to_string(),
            },
        }
    }
}

/// Converts a number to `SQLite`'s signed integer. Stored values were checked and are below 2^63.
fn stored(number: u64) -> i64 {
    i64::try_from(number).unwrap_or(i64::MAX)
}

fn number(row: &Row<'_>, column: usize) -> rusqlite::Result<u64> {
    row.get::<_, i64>(column)
        .map(|number| u64::try_from(number).unwrap_or(0))
}

/// Reads the name of a durability or a state.
fn named<T: DeserializeOwned>(row: &Row<'_>, column: usize) -> rusqlite::Result<T> {
    let name: String = row.get(column)?;
    serde_json::from_value(name.into()).map_err(|_| rusqlite::Error::InvalidQuery)
}

/// Reads a host name, and an incarnation in the column after it.
fn lender(row: &Row<'_>, column: usize) -> rusqlite::Result<LenderId> {
    Ok(LenderId {
        host: row.get(column)?,
        incarnation: Incarnation(number(row, column + 1)?),
    })
}

impl Registry for SqliteRegistry {
    fn offer(&self, offer: &Offer, ttl: Duration) -> Result<()> {
        let (lender, run) = (&offer.lender, stored(offer.lender.incarnation.0));
        check_name("host", &lender.host)?;
        check_bytes(offer.bytes, 0)?;
        let ttl = check_ttl(ttl)?;
        self.once(|now| {
            let query = "SELECT incarnation FROM lenders WHERE host = ?1";
            let known = now.sql.query_row(query, [&lender.host], |row| number(row, 0));
            if known.optional()? > Some(lender.incarnation.0) {
                let lender = lender.host.clone();
                return Err(RegistryError::Superseded { lender }.into());
            }
            now.change(
                "INSERT INTO lenders VALUES (?1, ?2, ?3, ?4, ?5)
                 ON CONFLICT (host) DO UPDATE SET incarnation = ?2, bytes = ?3, heard_ms = ?4, expires_ms = ?5",
                params![lender.host, run, stored(offer.bytes), now.ms, now.after(ttl)],
            )?;
            now.change(
                "DELETE FROM leases WHERE host = ?1 AND incarnation < ?2",
                params![lender.host, run],
            )
        })
    }

    fn withdraw(&self, lender: &LenderId) -> Result<()> {
        self.once(|now| {
            // The record stays, because its incarnation keeps an older daemon from lending again.
            now.change(
                "UPDATE lenders SET bytes = 0, heard_ms = ?3, expires_ms = ?3 WHERE host = ?1 AND incarnation = ?2",
                params![lender.host, stored(lender.incarnation.0), now.ms],
            )
        })
    }

    fn take(&self, want: &Want, ttl: Duration) -> Result<Lease> {
        want.check()?;
        let ttl = check_ttl(ttl)?;
        self.once(|now| {
            check_leases(&want.borrower, now.held_by(&want.borrower)?)?;
            let counts = now.leases_of_lenders()?;
            let leases = |view: &LenderView| counts.get(&view.lender.host).copied().unwrap_or(0);
            let lender = want.choose(now.lenders()?, |view| view, leases)?.lender;
            let id = now.next_id()?;
            now.change(
                "INSERT INTO leases (id, host, incarnation, borrower, vm, bytes, state, expires_ms, durability, disk_bytes) VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, ?8, ?9, ?10)",
                params![
                    stored(id.0),
                    lender.host,
                    stored(lender.incarnation.0),
                    want.borrower,
                    want.vm,
                    stored(want.bytes),
                    LeaseState::Taken.to_string(),
                    now.after(ttl),
                    want.durability.name(),
                    stored(want.disk_bytes)
                ],
            )?;
            now.of_borrower(id, &want.borrower)
        })
    }

    fn publish(&self, id: LeaseId, lender: &LenderId, endpoint: &Endpoint) -> Result<()> {
        endpoint.check()?;
        let text = serde_json::to_string(endpoint);
        let text = text.map_err(|error| value("endpoint", error.to_string()))?;
        self.once(|now| {
            let lease = now.of_lender(id, lender)?;
            if lease.state != LeaseState::Taken {
                return Err(wrong_state(id, lease.state, "exported").into());
            }
            now.change(
                "UPDATE leases SET state = ?2, endpoint = ?3 WHERE id = ?1",
                params![stored(id.0), LeaseState::Exported.to_string(), text],
            )
        })
    }

    fn endpoint(&self, id: LeaseId, borrower: &str) -> Result<Option<Endpoint>> {
        self.once(|now| {
            if now.of_borrower(id, borrower)?.state != LeaseState::Exported {
                return Ok(None);
            }
            let query = "SELECT endpoint FROM leases WHERE id = ?1";
            let text = now.sql.query_row(query, [stored(id.0)], |row| row.get(0));
            let text: Option<String> = text?;
            let read = text.map(|text| serde_json::from_str(&text)).transpose();
            Ok(read.map_err(|_| rusqlite::Error::InvalidQuery)?)
        })
    }

    fn renew(&self, id: LeaseId, borrower: &str, ttl: Duration) -> Result<Lease> {
        let ttl = check_ttl(ttl)?;
        self.once(|now| {
            let lease = now.of_borrower(id, borrower)?;
            if lease.state == LeaseState::Released {
                return Err(wrong_state(id, lease.state, "renewed").into());
            }
            now.change(
                "UPDATE leases SET expires_ms = ?2 WHERE id = ?1",
                [stored(id.0), now.after(ttl)],
            )?;
            now.of_borrower(id, borrower)
        })
    }

    fn sole_copy(&self, id: LeaseId, borrower: &str) -> Result<Lease> {
        self.once(|now| {
            let lease = now.of_borrower(id, borrower)?;
            if lease.durability != Durability::Disk {
                return Ok(lease);
            }
            let only = Durability::None;
            let time = check_ttl(only.time_to_give_back(lease.bytes_to_copy()))?;
            // A lease that was not recalled (NULL) stays so, because MAX of NULL is NULL.
            now.change(
                "UPDATE leases SET durability = ?2, recall_ms = MAX(recall_ms, ?3) WHERE id = ?1",
                params![stored(id.0), only.name(), now.after(time)],
            )?;
            now.of_borrower(id, borrower)
        })
    }

    fn recall(&self, id: LeaseId, lender: &LenderId, within: Duration) -> Result<()> {
        check_ttl(within)?;
        self.once(|now| {
            let within = check_ttl(now.of_lender(id, lender)?.within(within))?;
            now.change(
                "UPDATE leases SET recall_ms = MIN(COALESCE(recall_ms, ?2), ?2) WHERE id = ?1",
                [stored(id.0), now.after(within)],
            )
        })
    }

    fn release(&self, id: LeaseId, borrower: &str) -> Result<()> {
        self.once(|now| {
            now.change(
                "UPDATE leases SET state = ?3, endpoint = NULL WHERE id = ?1 AND borrower = ?2",
                params![stored(id.0), borrower, LeaseState::Released.to_string()],
            )
        })
    }

    fn ended(&self, id: LeaseId, lender: &LenderId) -> Result<()> {
        self.once(|now| {
            now.change(
                "DELETE FROM leases WHERE id = ?1 AND host = ?2 AND incarnation = ?3",
                params![stored(id.0), lender.host, stored(lender.incarnation.0)],
            )
        })
    }

    fn picture(&self) -> Result<Picture> {
        self.once(|now| {
            now.forget()?;
            let mut query = now.sql.prepare(&format!("{LEASE} ORDER BY id"))?;
            let leases = query.query_map([], |row| now.read_lease(row))?;
            Ok(Picture {
                lenders: now.lenders()?,
                leases: leases.collect::<rusqlite::Result<_>>()?,
            })
        })
    }
}
