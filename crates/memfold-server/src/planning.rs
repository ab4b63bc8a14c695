//! API paths for planning: how many more VMs fit on this host, and which VMs of several hosts
//! should run together.
//!
//! Users with the role *read* may ask for a plan, because it is computed from a report that they
//! may see anyway. Only users with the role *operate* may ask which VMs should run together,
//! because this takes CPU time and uses fingerprints of other hosts.

use axum::body::Bytes;
use axum::extract::Query;
use memfold_api::{AdviceQuery, AdviceReport, ErrorBody};
use memfold_daemon::{DaemonError, PlaceOrder};
use memfold_ledger::estimate::place::Proposal;
use memfold_ledger::plan::{Order, Plan, parse_hours, parse_kind, parse_number};
use memfold_units::ByteSize;

use super::answer::{Answered, Served, blocking};

/// Parses the query of a plan, which has the syntax of the command line. `kind` and `vms` may be
/// repeated.
fn order(pairs: &[(String, String)]) -> Result<Order, String> {
    let mut order = Order::default();
    for (name, value) in pairs {
        match name.as_str() {
            "kind" => order.kinds.push(parse_kind(value)?),
            "vms" => order.vms.push(parse_number(value)?),
            "memory" => {
                let bytes = value.parse::<ByteSize>();
                let bytes = bytes.map_err(|error| format!("memory: {error}"))?;
                order.memory_bytes = Some(bytes.0);
            }
            "ahead_hours" => order.ahead_hours = parse_hours(value)?,
            _ => {
                return Err(format!(
                    "'{name}' is not a parameter of a plan; give kind, vms, memory or ahead_hours"
                ));
            }
        }
    }
    Ok(order)
}

/// Computes from the running VMs how many VMs fit: the JSON of `memfold plan`.
#[utoipa::path(get, path = "/v1/plan", params(
    ("kind" = Option<String>, Query, description = "`KIND=VM,VM`; several. By default the VMs of each trust domain are one"),
    ("vms" = Option<String>, Query, description = "`KIND=NUMBER` in all; several. By default as many as run"),
    ("memory" = Option<String>, Query, description = "A size (`128G`); by default this host's"),
    ("ahead_hours" = Option<f64>, Query, description = "Hours, 0 to 8760, in which VMs grow as they have lately; by default 0"),
), responses((status = 200, body = Plan), (status = 400, body = ErrorBody)))]
pub(super) async fn plan(
    daemon: Served,
    Query(pairs): Query<Vec<(String, String)>>,
) -> Answered<Plan> {
    let order = order(&pairs).map_err(DaemonError::BadRequest);
    blocking(daemon, move |d| d.views().plan(&order?)).await
}

/// Advises what memory each running VM should be given, from its recorded history: the JSON of
/// `memfold advise`.
#[utoipa::path(get, path = "/v1/advice", params(AdviceQuery), responses((status = 200, body = AdviceReport), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody)))]
pub(super) async fn advice(
    daemon: Served,
    Query(query): Query<AdviceQuery>,
) -> Answered<AdviceReport> {
    blocking(daemon, move |d| d.views().advise(query.days)).await
}

/// Proposes which VMs of several hosts to place together: the JSON of `memfold plan --place`.
#[utoipa::path(post, path = "/v1/plan/place", request_body = PlaceOrder, responses((status = 200, body = Object), (status = 400, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub(super) async fn place(daemon: Served, body: Bytes) -> Answered<Proposal> {
    // The body may be long, so it is parsed outside the async threads.
    blocking(daemon, move |d| {
        let order: PlaceOrder = serde_json::from_slice(&body)
            .map_err(|error| DaemonError::BadRequest(format!("no fingerprints: {error}")))?;
        d.views().place(&order)
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn query_parameters_of_a_plan_are_parsed_like_the_options_of_memfold_plan() {
        let pairs = |all: &[(&str, &str)]| {
            let all = all.iter().map(|(a, b)| ((*a).to_owned(), (*b).to_owned()));
            order(&all.collect::<Vec<_>>())
        };
        let asked = [
            ("kind", "web=a,b"),
            ("kind", "db=c"),
            ("vms", "web=20"),
            ("memory", "2G"),
            ("ahead_hours", "1.5"),
        ];
        let asked = pairs(&asked).unwrap();
        assert_eq!(asked.kinds[1], ("db".to_owned(), vec!["c".to_owned()]));
        assert_eq!(asked.kinds.len(), 2);
        assert_eq!(asked.vms, [("web".to_owned(), 20)]);
        assert_eq!(asked.memory_bytes, Some(2 << 30));
        assert!((asked.ahead_hours - 1.5).abs() < 1e-9);
        assert_eq!(pairs(&[]), Ok(Order::default()));
        for wrong in [
            ("kind", "web"),
            ("vms", "web=x"),
            ("memory", "much"),
            ("ahead_hours", "-1"),
            ("x", "1"),
        ] {
            assert!(pairs(&[wrong]).is_err(), "{wrong:?}");
        }
    }
}
