// Section "topics": the names under which nodes meet: gossip topics, streams and keys of the DHT.
// The major version is in each of them.

import { fromHex, join, toHex, utf8 } from './bytes.js'
import { derive } from './digest.js'
import { refuse } from './errors.js'
import { MAJOR } from './spec.js'

export const CARGOES = ['groups', 'heads', 'receipts', 'verdicts', 'joins', 'heartbeats', 'grants', 'inventories']
export const ROLES = ['trainer', 'verifier', 'sampler', 'bootstrap']
export const STREAMS = ['rollout', 'deliver', 'chain', 'wants', 'blob', 'bulk', 'peers', 'vote', 'grants', 'manifest', 'credit', 'groups'].map((name) => `/echo/${name}/${MAJOR}`)
export const DHT = `/echo/kad/${MAJOR}.0.0`

// A multihash: BLAKE3, 32 bytes.
const MULTIHASH = fromHex('1e20')

export function topic(run, cargo) {
  if (!CARGOES.includes(cargo)) refuse('out-of-range', `no cargo ${cargo}`)
  return `/echo/${MAJOR}/${toHex(run)}/${cargo}`
}

export function roleKey(run, role) {
  if (!ROLES.includes(role)) refuse('out-of-range', `no role ${role}`)
  return join(MULTIHASH, derive('role', run, utf8(role)))
}

export const blobKey = (digest) => join(MULTIHASH, digest)
