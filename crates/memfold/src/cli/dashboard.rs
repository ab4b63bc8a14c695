//! `memfold dashboard`: prints a URL with which a browser can log in.

use std::process::ExitCode;

use clap::Args;
use memfold_api::{CodeRequest, LoginCode, Role};

use super::context::Context;

#[derive(Args, Debug)]
pub(super) struct Arguments {
    /// Role of the browser's session
    #[arg(long, value_enum, default_value_t = Role::Operate)]
    role: Role,
}

pub(super) fn run(context: &Context, arguments: &Arguments) -> anyhow::Result<ExitCode> {
    let request = CodeRequest {
        role: arguments.role,
    };
    let code: LoginCode = context.client()?.post("/v1/session/codes", &request)?;
    context.print(&code, |code| {
        format!(
            "{}\n\nEach address logs one browser in, once and within {} s; the browser may {}. From another machine: forward the port by ssh.",
            code.urls.join("\n"),
            code.valid_s,
            code.role.name()
        )
    })
}
