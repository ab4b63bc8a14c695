//! Serializes a size, which may be unset, as text such as `"512M"`. Also accepts a number of bytes.

use memfold_units::ByteSize;
use serde::{Deserialize, Deserializer, Serializer, de::Error};

#[derive(Deserialize)]
#[serde(untagged)]
enum Size {
    Bytes(u64),
    Text(String),
}

pub fn serialize<S: Serializer, T>(size: &T, to: S) -> Result<S::Ok, S::Error>
where
    T: Copy + Into<Option<ByteSize>>,
{
    match (*size).into() {
        None => to.serialize_none(),
        Some(ByteSize(n)) if n % (1 << 20) == 0 => to.serialize_str(&format!("{}M", n >> 20)),
        Some(ByteSize(n)) => to.serialize_u64(n),
    }
}

pub fn deserialize<'de, D: Deserializer<'de>, T>(from: D) -> Result<T, D::Error>
where
    T: Default + From<ByteSize>,
{
    match Option::deserialize(from)? {
        None => Ok(T::default()),
        Some(Size::Bytes(n)) => Ok(ByteSize(n).into()),
        Some(Size::Text(text)) => text.parse().map(ByteSize::into).map_err(D::Error::custom),
    }
}
