use std::os::unix::fs::FileExt as _;

use memfold_host::progress::Progress;
use memfold_units::PAGE_SIZE;

use super::super::image::{SUM_BYTES, pages_sum};
use super::super::manifest::{DEVICES, INDEX, REFERENCES, SEALED};
use super::super::pack;
use super::super::stored::{Pages, Stored};
use super::*;

const CHUNKS: usize = 4;

fn operator(byte: u8) -> OperatorKey {
    let key = blake3::hash(&[byte]).to_hex();
    OperatorKey::parse(key.as_bytes()).unwrap()
}

/// Returns an image whose first chunk is full, the second has some pages, the third is empty, and
/// the last has its last page.
fn image() -> Vec<u8> {
    let mut ram = vec![0; CHUNKS * CHUNK_BYTES];
    let full = 0..CHUNK_BYTES;
    let some = CHUNK_BYTES + 7 * PAGE_BYTES..CHUNK_BYTES + 30 * PAGE_BYTES;
    let last = CHUNKS * CHUNK_BYTES - PAGE_BYTES..CHUNKS * CHUNK_BYTES;
    for (byte, at) in full.chain(some).chain(last).enumerate() {
        ram[at] = u8::try_from(byte % 251).unwrap() | 1;
    }
    ram
}

/// Encrypts an image. Returns its file and its sealed table of frames.
fn seal(ram: &[u8], key: &DataKey, compress: bool) -> (File, Vec<u8>) {
    let file = tempfile::tempfile().unwrap();
    let image = SealedImage::new(key.clone(), SEALED, compress, CHUNKS).unwrap();
    let mut buffer = vec![0x55; BODY_BYTES];
    for (number, chunk) in ram.chunks_exact(CHUNK_BYTES).enumerate() {
        let mut body = Body::new(&mut buffer);
        // In pieces, as a save adds them.
        for (first, piece) in (0..).step_by(64).zip(chunk.chunks_exact(64 * PAGE_BYTES)) {
            body.add(first, piece).unwrap();
        }
        image.write(number as u64, body, &file, None).unwrap();
    }
    assert_eq!(image.bytes(), file.metadata().unwrap().len());
    let index = image.index(b"layout", INDEX).unwrap();
    (file, index)
}

/// Opens an encrypted image.
fn open(ram: &[u8], file: File, index: Vec<u8>, key: &DataKey, compress: bool) -> Stored {
    let index = key.open_file(INDEX, b"layout", index).unwrap();
    let sums = ram.chunks_exact(CHUNK_BYTES);
    let sums: Vec<u8> = sums.flat_map(|c| pages_sum(0, c).to_le_bytes()).collect();
    assert_eq!(sums.len(), SUM_BYTES * CHUNKS);
    Stored {
        bytes: ram.len() as u64,
        sums,
        sums_of_pages: true,
        pages: Pages::Sealed(SealedPages {
            file,
            frames: pack::frames(&index, CHUNKS as u64).unwrap(),
            sealer: key.of_file(SEALED).unwrap(),
            is_compressed: compress,
        }),
        references: Vec::new(),
        sources: Vec::new(),
    }
}

fn frames(stored: &mut Stored) -> &mut Vec<Frame> {
    match &mut stored.pages {
        Pages::Sealed(sealed) => &mut sealed.frames,
        _ => panic!("it is encrypted"),
    }
}

fn wrong(stored: &Stored) -> Vec<u64> {
    stored.verify(&Progress::default()).unwrap()
}

#[test]
fn an_encrypted_ram_image_is_decrypted_in_an_unwritable_file_and_shows_none_of_its_bytes() {
    for compress in [false, true] {
        let (ram, key) = (image(), DataKey::random().unwrap());
        let (file, index) = seal(&ram, &key, compress);
        let mut bytes = vec![0; usize::try_from(file.metadata().unwrap().len()).unwrap()];
        file.read_exact_at(&mut bytes, 0).unwrap();
        for at in [0, CHUNK_BYTES + 7 * PAGE_BYTES, ram.len() - PAGE_BYTES] {
            let words = &ram[at..at + 16];
            assert!(!bytes.windows(16).any(|found| found == words), "{compress}");
        }
        let stored = open(&ram, file, index, &key, compress);
        assert!(wrong(&stored).is_empty());
        assert!(stored.most_bytes() >= (512 + 23 + 1) * PAGE_SIZE);
        let laid = stored.lay_out("test", &Progress::default());
        let laid = laid.unwrap().unwrap();
        let mut whole = vec![1; ram.len()];
        laid.read_exact_at(&mut whole, 0).unwrap();
        assert!(whole == ram);
        assert!(laid.write_at(&[1], 0).is_err());
    }
}

#[test]
fn a_changed_frame_of_an_encrypted_image_is_reported_wherever_the_bit_is() {
    for compress in [false, true] {
        let (ram, key) = (image(), DataKey::random().unwrap());
        let (file, index) = seal(&ram, &key, compress);
        let again = file.try_clone().unwrap();
        let mut stored = open(&ram, again, index, &key, compress);
        let all = frames(&mut stored).clone();
        for (chunk, &(at, length)) in all.iter().enumerate().filter(|(_, of)| of.1 > 0) {
            let places = [
                0,
                1,
                63,
                64,
                length / 2,
                length - 17,
                length - 16,
                length - 1,
            ];
            for place in places.map(|place| at + place) {
                let mut byte = [0];
                file.read_exact_at(&mut byte, place).unwrap();
                file.write_all_at(&[byte[0] ^ 1], place).unwrap();
                assert_eq!(wrong(&stored), [chunk as u64], "byte {place}");
                file.write_all_at(&byte, place).unwrap();
            }
        }
        assert!(wrong(&stored).is_empty());
    }
}

#[test]
fn frames_of_an_encrypted_image_that_are_swapped_dropped_cut_off_or_of_another_snapshot_are_reported()
 {
    let (ram, key) = (image(), DataKey::random().unwrap());
    let (file, index) = seal(&ram, &key, false);
    let length = file.metadata().unwrap().len();
    let mut stored = open(&ram, file.try_clone().unwrap(), index, &key, false);
    let all = frames(&mut stored).clone();
    frames(&mut stored).swap(0, 1);
    assert_eq!(wrong(&stored), [0, 1]);
    frames(&mut stored).clone_from(&all);
    // An empty chunk cannot get the frame of another one.
    frames(&mut stored)[2] = all[3];
    assert_eq!(wrong(&stored), [2]);
    frames(&mut stored).clone_from(&all);
    frames(&mut stored)[1] = (0, 0);
    assert_eq!(wrong(&stored), [1]);
    frames(&mut stored).clone_from(&all);
    for (at, bytes) in [(0, 0), (all[0].0, 15), (all[0].0, 16), (u64::MAX - 3, 80)] {
        frames(&mut stored)[0] = (at, bytes);
        assert_eq!(wrong(&stored), [0], "{at} {bytes}");
    }
    frames(&mut stored).clone_from(&all);
    file.set_len(length - 1).unwrap();
    assert_eq!(wrong(&stored), [3]);
    let other = DataKey::random().unwrap();
    let (file, index) = seal(&ram, &other, false);
    assert!(key.open_file(INDEX, b"layout", index.clone()).is_err());
    let mut stored = open(&ram, file, index, &other, false);
    if let Pages::Sealed(sealed) = &mut stored.pages {
        sealed.sealer = key.of_file(SEALED).unwrap();
    }
    assert_eq!(wrong(&stored), [0, 1, 3]);
}

#[test]
fn a_chunk_or_a_page_is_encrypted_only_once_with_the_same_key() {
    let key = DataKey::random().unwrap();
    let image = SealedImage::new(key, SEALED, false, 2).unwrap();
    let file = tempfile::tempfile().unwrap();
    let mut buffer = vec![0; BODY_BYTES];
    for is_first in [true, false] {
        let mut body = Body::new(&mut buffer);
        assert_eq!(body.add(3, &[7; PAGE_BYTES]).unwrap(), 1);
        assert!(body.add(3, &[8; PAGE_BYTES]).is_err());
        assert!(body.add(1, &[8; PAGE_BYTES]).is_err());
        assert_eq!(image.write(1, body, &file, None).is_ok(), is_first);
    }
    let mut body = Body::new(&mut buffer);
    body.add(0, &[7; PAGE_BYTES]).unwrap();
    assert!(image.write(2, body, &file, None).is_err());
}

#[test]
fn every_flipped_bit_and_every_length_of_the_header_of_an_encrypted_snapshot_is_refused() {
    let (operator, key) = (operator(1), DataKey::random().unwrap());
    let header = key.wrap(&operator).unwrap();
    assert_eq!(header.len(), HEADER_BYTES);
    assert_eq!(*DataKey::unwrap(&header, &operator).unwrap().0, *key.0);
    for byte in 0..header.len() {
        for bit in 0..8 {
            let mut changed = header.clone();
            changed[byte] ^= 1 << bit;
            let why = DataKey::unwrap(&changed, &operator).unwrap_err();
            let expected = match byte {
                0..8 => matches!(why, HeaderError::Magic),
                8..12 => matches!(why, HeaderError::Version(_)),
                16..32 => matches!(why, HeaderError::OtherKey),
                _ => matches!(why, HeaderError::Damaged),
            };
            assert!(expected, "byte {byte}: {why:?}");
        }
    }
    for length in 0..header.len() {
        let why = DataKey::unwrap(&header[..length], &operator).unwrap_err();
        assert_eq!(why, HeaderError::Length(length));
    }
    let longer = [header.as_slice(), &[0]].concat();
    let why = DataKey::unwrap(&longer, &operator).unwrap_err();
    assert_eq!(why, HeaderError::Length(HEADER_BYTES + 1));
}

#[test]
fn the_data_key_of_a_snapshot_does_not_open_with_another_key_or_another_salt() {
    let (first, second) = (operator(1), operator(2));
    let key = DataKey::random().unwrap();
    let (header, again) = (key.wrap(&first).unwrap(), key.wrap(&first).unwrap());
    assert_ne!(header, again);
    let why = DataKey::unwrap(&header, &second).unwrap_err();
    assert_eq!(why, HeaderError::OtherKey);
    // The name of the second key does not make it the right one.
    let mut renamed = header.clone();
    renamed[ID_AT..SALT_AT].copy_from_slice(&second.id());
    let why = DataKey::unwrap(&renamed, &second).unwrap_err();
    assert_eq!(why, HeaderError::Damaged);
    let mixed = [&header[..WRAPPED_AT], &again[WRAPPED_AT..]].concat();
    let why = DataKey::unwrap(&mixed, &first).unwrap_err();
    assert_eq!(why, HeaderError::Damaged);
}

#[test]
fn an_encrypted_file_of_a_snapshot_opens_only_under_its_name_with_its_layout_and_unchanged() {
    let key = DataKey::random().unwrap();
    let sealed = key.seal_file(DEVICES, b"", b"state".to_vec()).unwrap();
    assert_eq!(sealed.len(), 5 + TAG_BYTES);
    let open = |part: &str, bound: &[u8], bytes: &[u8]| key.open_file(part, bound, bytes.to_vec());
    assert_eq!(open(DEVICES, b"", &sealed).unwrap(), b"state");
    assert!(open(REFERENCES, b"", &sealed).is_err());
    assert!(open(DEVICES, b"x", &sealed).is_err());
    for byte in 0..sealed.len() {
        let mut changed = sealed.clone();
        changed[byte] ^= 0x80;
        assert!(open(DEVICES, b"", &changed).is_err(), "byte {byte}");
        assert!(open(DEVICES, b"", &sealed[..byte]).is_err());
    }
    let block = |name: &str, first_page, pages| ImageBlock {
        name: name.into(),
        first_page,
        pages,
    };
    let layouts = [
        bound_layout(1, &[]),
        bound_layout(2, &[]),
        bound_layout(1, &[block("a", 0, 1)]),
        bound_layout(1, &[block("a", 0, 2)]),
        bound_layout(1, &[block("a", 512, 1)]),
        bound_layout(1, &[block("b", 0, 1)]),
        bound_layout(1, &[block("a", 0, 1), block("", 0, 0)]),
    ];
    for (number, layout) in layouts.iter().enumerate() {
        assert!(!layouts[..number].contains(layout), "{number}");
    }
}

#[test]
fn a_frame_whose_list_of_pages_does_not_fit_its_length_is_refused() {
    let mut chunk = vec![1; CHUNK_BYTES];
    let mut body = vec![0; BITS_BYTES + PAGE_BYTES];
    body[1] = 0x10;
    body[BITS_BYTES..].fill(9);
    expand(&body, &mut chunk).unwrap();
    assert!(
        chunk[12 * PAGE_BYTES..13 * PAGE_BYTES]
            .iter()
            .all(|&byte| byte == 9)
    );
    assert!(chunk[..12 * PAGE_BYTES].iter().all(|&byte| byte == 0));
    body[2] = 1;
    assert!(expand(&body, &mut chunk).is_err());
    body[1] = 0;
    body[2] = 0;
    assert!(expand(&body, &mut chunk).is_err());
    assert!(expand(&body[..BITS_BYTES - 1], &mut chunk).is_err());
    assert!(expand(&[], &mut chunk).is_err());
}

#[test]
fn keys_do_not_show_in_debug_texts() {
    let told = format!("{:?} {:?}", operator(0), DataKey::random().unwrap());
    assert_eq!(told, "OperatorKey DataKey");
}
