//! https to others, and whom it trusts: the host's roots, or the certificates of one file alone.

use std::path::Path;

use anyhow::{Context as _, bail};
use hyper::Uri;
use hyper_rustls::{ConfigBuilderExt as _, HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::connect::HttpConnector;
use rustls::pki_types::CertificateDer;
use rustls::pki_types::pem::PemObject as _;
use rustls::{ClientConfig, RootCertStore};

/// Which HTTP is spoken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Http {
    /// HTTP/1.1.
    One,
    /// HTTP/2, for gRPC.
    Two,
}

/// Connects to an address of `http://` or `https://`. `ca_file` is the value of the key `key`.
///
/// # Errors
/// If the file cannot be read or has no certificate, or the host has no roots.
pub(super) fn connector(
    uri: &Uri,
    http: Http,
    key: &str,
    ca_file: Option<&Path>,
) -> anyhow::Result<HttpsConnector<HttpConnector>> {
    let trust = match (uri.scheme_str(), ca_file) {
        (Some("https"), Some(file)) => trust_of(file).with_context(|| format!("{key} {}", file.display()))?,
        (Some("https"), None) => ClientConfig::builder()
            .with_native_roots()
            .with_context(|| format!("this host has no roots of trust; name a file with {key}"))?,
        // No certificate is ever looked at.
        _ => ClientConfig::builder().with_root_certificates(RootCertStore::empty()),
    };
    let connector = HttpsConnectorBuilder::new().with_tls_config(trust.with_no_client_auth()).https_or_http();
    Ok(match http {
        Http::One => connector.enable_http1().build(),
        Http::Two => connector.enable_http2().build(),
    })
}

/// The certificates of a PEM file, and no others.
fn trust_of(
    file: &Path,
) -> anyhow::Result<rustls::ConfigBuilder<ClientConfig, rustls::client::WantsClientCert>> {
    let mut roots = RootCertStore::empty();
    for certificate in CertificateDer::pem_file_iter(file)? {
        roots.add(certificate?)?;
    }
    if roots.is_empty() {
        bail!("there is no certificate in it; it needs at least one, as PEM");
    }
    Ok(ClientConfig::builder().with_root_certificates(roots))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_without_certificates_is_refused_with_its_key() {
        let dir = tempfile::tempdir().unwrap();
        let (empty, absent) = (dir.path().join("empty.pem"), dir.path().join("absent.pem"));
        std::fs::write(&empty, "no certificate\n").unwrap();
        let uri = Uri::from_static("https://example.org/");
        for (file, why) in [(&empty, "no certificate in it"), (&absent, "absent.pem")] {
            let error = connector(&uri, Http::Two, "otlp.ca_file", Some(file)).err().unwrap();
            let words = format!("{error:#}");
            assert!(words.starts_with("otlp.ca_file") && words.contains(why), "{words}");
        }
    }
}
