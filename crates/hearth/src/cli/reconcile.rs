//! `hearth node reconcile`: one pass of the daemon's loop, or the plan of one.

use hearth_api::v1::{Finding, ReconcileRequest, ReconcileResponse};
use serde_json::{Value, json};

use super::Context;
use super::client::Client;
use super::error::{self, CliError};
use super::{out, view};

/// Asks for one pass and shows what it found. Exit code 1 if something is not as the daemon's books say and stays.
pub(super) async fn run(client: &Client, dry_run: bool, context: &Context) -> Result<u8, CliError> {
    let failed = |s| CliError::from_status("cannot reconcile the node", &s);
    let pass = client.nodes().reconcile(ReconcileRequest { dry_run }).await.map_err(failed)?.into_inner();
    if context.json {
        out::json(&pass_json(&pass))?;
    } else {
        if !pass.findings.is_empty() {
            let rows = pass.findings.iter().map(|f| {
                let age = view::span(f.age_ms);
                vec![f.what.clone(), f.sightings.to_string(), age, f.outcome.clone(), evidence(f)]
            });
            out::print(&view::table(&["FINDING", "SEEN", "SINCE", "OUTCOME", "EVIDENCE"], rows))?;
        }
        out::line(&summary(&pass))?;
    }
    Ok(if is_well(&pass) { error::OK } else { error::FAILED })
}

fn evidence(finding: &Finding) -> String {
    match finding.why.as_str() {
        "" => finding.evidence.clone(),
        why => format!("{}; {why}", finding.evidence),
    }
}

fn summary(pass: &ReconcileResponse) -> String {
    let ReconcileResponse { result, reason, objects, took_ms, findings } = pass;
    let why = if reason.is_empty() { String::new() } else { format!(" ({reason})") };
    format!("{result}{why}: {objects} objects seen, {} findings, {took_ms} ms", findings.len())
}

/// Whether nothing of what was found stays.
fn is_well(pass: &ReconcileResponse) -> bool {
    pass.result == "ok" && pass.findings.iter().all(|f| matches!(f.outcome.as_str(), "released" | "spared"))
}

fn pass_json(pass: &ReconcileResponse) -> Value {
    let finding = |f: &Finding| {
        json!({
            "kind": f.kind,
            "what": f.what,
            "evidence": f.evidence,
            "sightings": f.sightings,
            "age_ms": f.age_ms,
            "outcome": f.outcome,
            "why": f.why,
        })
    };
    json!({
        "result": pass.result,
        "reason": pass.reason,
        "objects": pass.objects,
        "took_ms": pass.took_ms,
        "findings": pass.findings.iter().map(finding).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pass_is_well_only_if_nothing_stays() {
        let pass = |result: &str, outcomes: &[&str]| {
            let finding = |o: &&str| Finding { outcome: (*o).into(), ..Finding::default() };
            let findings = outcomes.iter().map(finding).collect();
            ReconcileResponse { result: result.into(), findings, ..ReconcileResponse::default() }
        };
        assert!(is_well(&pass("ok", &[])));
        assert!(is_well(&pass("ok", &["released", "spared"])));
        for outcome in ["waiting", "due", "reported", "failed"] {
            assert!(!is_well(&pass("ok", &["released", outcome])), "{outcome}");
        }
        for result in ["failed", "capped", "incomplete", ""] {
            assert!(!is_well(&pass(result, &[])), "{result}");
        }
    }
}
