// Section "digest": names for bytes. BLAKE3 with a context of its own for each kind of thing, so that no two kinds share
// a hash; plain BLAKE3 for blobs; and Merkle roots.

import { blake3 } from '@noble/hashes/blake3.js'
import { join, u64be, utf8 } from './bytes.js'
import { MAJOR } from './spec.js'

/** "None" where a digest is required. */
export const ZERO = new Uint8Array(32)

export const context = (name) => utf8(`echo/${name}/${MAJOR}`)

/** BLAKE3 in derive-key mode, with the context of `name`, over the parts joined. */
export function derive(name, ...parts) {
  return blake3(join(...parts), { context: context(name) })
}

/** The name of what is fetched by its hash. */
export const blob = (bytes) => blake3(bytes)

/** BLAKE3 in keyed mode, `length` bytes of its extended output. */
export function keyedHash(key, bytes, length = 32) {
  return blake3(bytes, { key, dkLen: length })
}

export function merkleRoot(leaves) {
  let level = leaves.map((leaf) => derive('leaf', leaf))
  while (level.length > 1) {
    const next = []
    for (let i = 0; i + 1 < level.length; i += 2) next.push(derive('node', level[i], level[i + 1]))
    if (level.length % 2 === 1) next.push(level.at(-1))
    level = next
  }
  return derive('root', u64be(leaves.length), ...level)
}
