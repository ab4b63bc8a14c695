//! `memfold advise`: advises what memory each VM should be given, from its recorded history.

use std::process::ExitCode;

use clap::Args;

use memfold_api::{AdviceReport, VmAdvice};
use memfold_ledger::table::signed;
use memfold_units::ByteSize;

use super::context::Context;
use super::table::table;

#[derive(Args, Debug)]
pub(super) struct Arguments {
    /// Number of days to look back, 1 to 90
    #[arg(long, value_name = "DAYS", default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=90))]
    days: u32,
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let path = format!("/v1/advice?days={}", arguments.days);
    context.print(&context.client()?.get(&path)?, render)
}

fn render(report: &AdviceReport) -> String {
    if report.vms.is_empty() {
        return "no running VMs; the advice is for VMs that run".into();
    }
    let vms = table(
        "VM  >GIVEN  >P50  >P95  >P99  >ADVISED  ONE GIB LESS  BASED ON",
        report.vms.iter().map(row),
    );
    let (given, advised) = (ByteSize(report.given_bytes), ByteSize(report.advised_bytes));
    let change = if report.saved_bytes < 0 {
        format!("the VMs lack {}", signed(-report.saved_bytes))
    } else {
        format!("the host would save {}", signed(report.saved_bytes))
    };
    let mut text = format!("{vms}\n\n{given} given, {advised} advised: {change}");
    if report.vms.iter().any(|vm| vm.advice.is_none()) {
        text += "\n\nVMs without a recorded working set keep their RAM. Right-sizing records working \
                 sets in the modes 'watch' and 'on', from VMs with an agent or a balloon driver.";
    }
    text
}

fn row(vm: &VmAdvice) -> [String; 8] {
    let size = |bytes: u64| ByteSize(bytes).to_string();
    let given = size(vm.given_bytes);
    let Some(advice) = &vm.advice else {
        let [p50, p95, p99, advised] = ["-"; 4].map(str::to_owned);
        let based = "no recorded working set".to_owned();
        return [
            vm.vm.clone(),
            given,
            p50,
            p95,
            p99,
            advised,
            "-".into(),
            based,
        ];
    };
    let cost = if advice.short_time_with_one_gib_less > 0.0 {
        format!(
            "{} too little for {:.1} % of the time",
            size(advice.lack_with_one_gib_less_bytes),
            advice.short_time_with_one_gib_less * 100.0
        )
    } else {
        "would have sufficed".into()
    };
    let hours = advice.covered_s as f64 / 3600.0;
    let kind = if advice.probed_percent >= 50.0 {
        "measured"
    } else {
        "an upper bound"
    };
    [
        vm.vm.clone(),
        given,
        size(advice.p50_bytes),
        size(advice.p95_bytes),
        size(advice.p99_bytes),
        size(advice.advised_bytes),
        cost,
        format!("{hours:.1} h, {kind}"),
    ]
}

#[cfg(test)]
mod tests {
    use super::*;
    use memfold_api::SizeAdvice;

    #[test]
    fn memfold_advise_shows_percentiles_advice_and_cost_of_each_vm_and_what_the_host_saves() {
        let report = AdviceReport {
            days: 7,
            given_bytes: 10 << 30,
            advised_bytes: 5 << 30,
            saved_bytes: 5 << 30,
            vms: vec![
                VmAdvice {
                    vm: "db".into(),
                    given_bytes: 8 << 30,
                    advice: Some(SizeAdvice {
                        covered_s: 9000,
                        probed_percent: 90.0,
                        p50_bytes: 1 << 30,
                        p99_bytes: 5 << 29,
                        advised_bytes: 3 << 30,
                        short_time_with_one_gib_less: 0.125,
                        lack_with_one_gib_less_bytes: 1 << 28,
                        ..SizeAdvice::default()
                    }),
                },
                VmAdvice {
                    vm: "new".into(),
                    given_bytes: 2 << 30,
                    advice: None,
                },
            ],
        };
        let text = render(&report);
        for words in [
            "2.50 GiB",
            "256 MiB too little for 12.5 % of the time",
            "2.5 h, measured",
            "no recorded working set",
            "10.0 GiB given, 5.00 GiB advised: the host would save 5.00 GiB",
            "keep their RAM",
        ] {
            assert!(text.contains(words), "{words:?} is not in\n{text}");
        }
        let lacking = AdviceReport {
            saved_bytes: -(1 << 30),
            ..report
        };
        assert!(render(&lacking).contains("the VMs lack 1.00 GiB"));
        assert!(render(&AdviceReport::default()).contains("no running VMs"));
    }
}
