//! Requests about libvirt domains.

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// `POST /v1/libvirt/attach`, `POST /v1/libvirt/disable`
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LibvirtRequest {
    /// Name of the domain in libvirt.
    pub domain: String,
}

/// `POST /v1/libvirt/enable`
#[derive(Clone, Debug, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct LibvirtEnableRequest {
    /// Name of the domain in libvirt.
    pub domain: String,
    /// Trust domain of the VM; null: it shares memory with no other.
    #[serde(default)]
    pub trust_domain: Option<String>,
}
