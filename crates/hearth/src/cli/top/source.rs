//! What feeds `hearth top`: the daemon's answers, the host's load, and what came of a delete. Never ends by itself; a
//! daemon that is away is looked for again.

use std::fs;
use std::net::IpAddr;
use std::time::Duration;

use hearth_api::v1::{DeleteRequest, InfoRequest, ListRequest};
use tokio::sync::mpsc::Sender;

use super::super::client::Client;
use super::super::error::CliError;
use super::model::{Answer, Event, Load};

/// How long one answer may take.
const WITHIN: Duration = Duration::from_secs(5);

/// Asks again and again until nobody listens.
pub(super) async fn run(addr: String, every: Duration, events: Sender<Event>) {
    let mut client = None;
    loop {
        let load = if is_here(&addr) { load() } else { None };
        let event = match ask(&addr, &mut client).await {
            Ok(answer) => Event::Answer(Box::new(answer)),
            Err(why) => {
                // A connection that failed once is made anew: the next daemon may be another one.
                client = None;
                Event::Silent(why)
            }
        };
        if events.send(Event::Load(load)).await.is_err() || events.send(event).await.is_err() {
            return;
        }
        tokio::time::sleep(every).await;
    }
}

async fn ask(addr: &str, client: &mut Option<Client>) -> Result<Answer, String> {
    let answer = async {
        let connected = match client.take() {
            Some(client) => client,
            None => Client::connect(addr, true).await.map_err(|e| e.why().to_owned())?,
        };
        let failed = |s| CliError::from_status("node", &s).why().to_owned();
        let info = connected.nodes().info(InfoRequest {}).await.map_err(failed)?.into_inner();
        // One that starts says so, which is an answer.
        let sandboxes = match connected.sandboxes().list(ListRequest::default()).await {
            Ok(list) => Ok(list.into_inner().sandboxes),
            Err(status) => Err(CliError::from_status("list", &status).why().to_owned()),
        };
        *client = Some(connected);
        Ok(Answer { info, sandboxes })
    };
    match tokio::time::timeout(WITHIN, answer).await {
        Ok(answer) => answer,
        Err(_) => Err(format!("nothing came for {} s", WITHIN.as_secs())),
    }
}

/// Deletes one life, by its id, and tells what came of it. It takes as long as the daemon does.
pub(super) async fn delete(addr: String, id: String, name: String, events: Sender<Event>) {
    let done = async {
        let client = Client::connect(&addr, true).await.map_err(|e| e.why().to_owned())?;
        let request = DeleteRequest { sandbox: id.clone() };
        let done = client.sandboxes().delete(request).await;
        done.map(drop).map_err(|s| CliError::from_status("delete", &s).why().to_owned())
    };
    let failed = done.await.err();
    // Nobody listens any more: nobody needs to know.
    drop(events.send(Event::Deleted { id, name, failed }).await);
}

/// Whether a daemon at this address is on this host.
fn is_here(addr: &str) -> bool {
    let host = addr.rsplit_once("://").map_or(addr, |(_, rest)| rest);
    let host = host.rsplit_once(':').map_or(host, |(host, _)| host).trim_matches(['[', ']']);
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|ip| ip.to_canonical().is_loopback())
}

/// The load of this host; nothing where `/proc` does not say.
fn load() -> Option<Load> {
    let pressure = ["cpu", "memory", "io"].map(|of| {
        let text = fs::read_to_string(format!("/proc/pressure/{of}")).ok()?;
        pressure(&text)
    });
    let cpus = std::thread::available_parallelism().ok()?.get();
    parse(
        &fs::read_to_string("/proc/loadavg").ok()?,
        &fs::read_to_string("/proc/meminfo").ok()?,
        cpus,
        pressure,
    )
}

fn parse(loadavg: &str, meminfo: &str, cpus: usize, pressure: [Option<f64>; 3]) -> Option<Load> {
    let mut average = loadavg.split_whitespace().map(str::to_owned);
    let average = [average.next()?, average.next()?, average.next()?];
    let kib = |name: &str| {
        let line = meminfo.lines().find_map(|l| l.strip_prefix(name)?.strip_prefix(':'));
        line?.split_whitespace().next()?.parse().ok()
    };
    let (memory_total_kib, memory_available_kib) = (kib("MemTotal")?, kib("MemAvailable")?);
    Some(Load { average, cpus, memory_total_kib, memory_available_kib, pressure })
}

/// `some avg10=1.23 …`
fn pressure(text: &str) -> Option<f64> {
    let some = text.lines().find_map(|l| l.strip_prefix("some "))?;
    some.split_whitespace().find_map(|w| w.strip_prefix("avg10=")?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_loopback_address_is_this_host() {
        for here in
            ["127.0.0.1:5008", "[::1]:5008", "localhost:80", "http://127.0.0.2:1", "[::ffff:127.0.0.1]:1"]
        {
            assert!(is_here(here), "{here}");
        }
        for there in ["10.0.0.1:5008", "node-7:5008", "http://[2001:db8::1]:5008", "127.example.org:1"] {
            assert!(!is_here(there), "{there}");
        }
    }

    #[test]
    fn the_load_is_what_the_kernel_says() {
        let meminfo = "MemTotal:        8000 kB\nMemFree:  1 kB\nMemAvailable:    6000 kB\n";
        let load = parse("0.52 1.00 12.25 3/400 99\n", meminfo, 2, [Some(1.5), None, None]).unwrap();
        assert_eq!(load.average, ["0.52", "1.00", "12.25"]);
        assert_eq!((load.memory_total_kib, load.memory_available_kib), (8000, 6000));
        assert!(parse("0.52", meminfo, 2, [None; 3]).is_none());
        let text =
            "some avg10=12.50 avg60=0.00 avg300=0.00 total=1\nfull avg10=3.00 avg60=0 avg300=0 total=1\n";
        assert_eq!(pressure(text), Some(12.5));
        assert_eq!(pressure("nonsense"), None);
    }
}
