// A peer of js-libp2p in a swarm of echo-node: `node peer.js '{"seed": "…"}'`, with the private key in hexadecimal.
// It reads commands from stdin and writes answers and events to stdout, one JSON object a line; bytes are hexadecimal.
// A command is {"id", "do", …}; its answer {"id", "ok"} or {"id", "error"}. An event is {"event", …}. It ends with stdin.

import { createInterface } from 'node:readline'
import { noise } from '@chainsafe/libp2p-noise'
import { yamux } from '@chainsafe/libp2p-yamux'
import { generateKeyPairFromSeed } from '@libp2p/crypto/keys'
import { gossipsub, StrictNoSign, TopicValidatorResult } from '@libp2p/gossipsub'
import { identify } from '@libp2p/identify'
import { kadDHT, passthroughMapper } from '@libp2p/kad-dht'
import { peerIdFromString } from '@libp2p/peer-id'
import { ping } from '@libp2p/ping'
import { tcp } from '@libp2p/tcp'
import { byteStream } from '@libp2p/utils'
import { multiaddr } from '@multiformats/multiaddr'
import { createLibp2p } from 'libp2p'
import { CID } from 'multiformats/cid'
import * as raw from 'multiformats/codecs/raw'
import * as Digest from 'multiformats/hashes/digest'
import { fromHex, join, toHex, u32be, utf8 } from '../bytes.js'
import { blob, derive } from '../digest.js'
import { open, seal } from '../envelope.js'
import { Refused } from '../errors.js'
import { DHT } from '../topics.js'

// Node has it from version 22 on.
Promise.withResolvers ??= function withResolvers() {
  let resolve, reject
  const promise = new Promise((yes, no) => ([resolve, reject] = [yes, no]))
  return { promise, resolve, reject }
}

const MOST = 32 * 1024 * 1024
const SECONDS = 30
const { seed, inMesh = true, inDht = true } = JSON.parse(process.argv[2])

const say = (line) => process.stdout.write(`${JSON.stringify(line)}\n`)
const inTime = () => ({ signal: AbortSignal.timeout(SECONDS * 1000) })
const cidOf = (key) => CID.createV1(raw.code, Digest.decode(fromHex(key)))

// The name of a gossip message is its content.
const gossipId = ({ topic, data }) => derive('gossip', u32be(utf8(topic).length), utf8(topic), data)

// A peer that wants no mesh takes no links, sends nothing by itself, and lives on what is offered and asked for.
// It offers for longer than others do, so that a busy machine has the time to connect.
const NO_MESH = { D: 0, Dlo: 0, Dhi: 0, Dout: 0, Dscore: 0, floodPublish: false, mcacheGossip: 30, mcacheLength: 40 }

const node = await createLibp2p({
  privateKey: await generateKeyPairFromSeed('Ed25519', fromHex(seed)),
  addresses: { listen: ['/ip4/127.0.0.1/tcp/0'] },
  transports: [tcp()],
  connectionEncrypters: [noise()],
  streamMuxers: [yamux()],
  connectionGater: { denyDialMultiaddr: () => false }, // private addresses are all there are here
  services: {
    identify: identify(),
    ping: ping(),
    ...(inDht && { dht: kadDHT({ protocol: DHT, clientMode: false, peerInfoMapper: passthroughMapper }) }),
    gossip: gossipsub({
      globalSignaturePolicy: StrictNoSign,
      msgIdFn: gossipId,
      allowPublishToZeroTopicPeers: true,
      ...(!inMesh && NO_MESH),
    }),
  },
})
const { dht, gossip } = node.services

for (const event of ['peer:connect', 'peer:disconnect']) {
  node.addEventListener(event, ({ detail }) => say({ event, peer: String(detail) }))
}

const asked = new Map() // what a topic carries: its kind and run

gossip.addEventListener('gossipsub:message', ({ detail: { msg, propagationSource } }) => {
  const { kind, run } = asked.get(msg.topic)
  const { signer, id, record } = open(msg.data, kind, run)
  const via = String(propagationSource)
  say({ event: 'gossip', topic: msg.topic, data: toHex(msg.data), via, signer: toHex(signer), message: toHex(id), version: record.version })
})

/** Opens a message as the code of SPEC.md does; what that refuses is refused. */
function judge(from, { topic, data }) {
  const { kind, run } = asked.get(topic)
  try {
    open(data, kind, run)
    return TopicValidatorResult.Accept
  } catch (error) {
    if (!(error instanceof Refused)) throw error
    say({ event: 'refused', topic, from: String(from), reason: error.reason })
    return TopicValidatorResult.Reject
  }
}

/** A question over a stream of its own: length and bytes; the answer: an outcome, length and bytes. */
async function ask(peer, name, question, { halfClose }) {
  const stream = await node.dialProtocol(peerIdFromString(peer), name, inTime())
  const bytes = byteStream(stream, { maxBufferSize: MOST })
  await bytes.write(join(u32be(question.length), question), inTime())
  if (halfClose) await stream.close(inTime())
  const outcome = (await bytes.read({ bytes: 1, ...inTime() })).get(0)
  const answer = await readSized(bytes)
  if (!halfClose) await stream.close(inTime())
  return { outcome, answer }
}

/** Answers every question with its own bytes. */
async function echo(stream) {
  const bytes = byteStream(stream, { maxBufferSize: MOST })
  const question = await readSized(bytes)
  await bytes.write(join(Uint8Array.of(0), u32be(question.length), question), inTime())
  await stream.close(inTime())
}

async function readSized(bytes) {
  const length = (await bytes.read({ bytes: 4, ...inTime() })).getUint32(0)
  return length === 0 ? new Uint8Array(0) : (await bytes.read({ bytes: length, ...inTime() })).subarray()
}

const heartbeat = (version) => ({ ext: new Map(), head: new Uint8Array(32), term: 1, time_ms: Date.now(), version })

const COMMANDS = {
  dial: async ({ address }) => String((await node.dial(multiaddr(address), inTime())).remotePeer),

  peers: () => node.getPeers().map(String),

  async find({ key }) {
    const found = {}
    for await (const event of dht.findProviders(cidOf(key), inTime())) {
      if (event.name !== 'PROVIDER') continue
      for (const { id, multiaddrs } of event.providers) found[id] = { from: String(event.from), addresses: multiaddrs.map(String) }
    }
    return found
  },

  async provide({ key }) {
    const told = []
    for await (const event of dht.provide(cidOf(key), inTime())) {
      if (event.name === 'PEER_RESPONSE' && event.messageName === 'ADD_PROVIDER') told.push(String(event.from))
    }
    return told
  },

  subscribe({ topic, kind, run }) {
    asked.set(topic, { kind, run: fromHex(run) })
    gossip.topicValidators.set(topic, judge)
    gossip.subscribe(topic)
  },

  subscribers: ({ topic }) => gossip.getSubscribers(topic).map(String),
  neighbours: ({ topic }) => gossip.getMeshPeers(topic),

  /** A heartbeat of this peer's own, sealed; with `forge`, one whose signature has a flipped bit. */
  async say({ topic, run, version, forge }) {
    const sealed = seal('heartbeat', fromHex(run), fromHex(seed), heartbeat(version))
    if (forge) sealed[sealed.length - 1] ^= 1
    await gossip.publish(topic, sealed)
    return toHex(sealed)
  },

  async ask({ peer, stream, data, halfClose = true }) {
    const { outcome, answer } = await ask(peer, stream, fromHex(data), { halfClose })
    return { outcome, answer: toHex(answer) }
  },

  /** A large question: the bytes go and come back, and only their names are told. */
  async askLarge({ peer, stream, size }) {
    const question = new Uint8Array(size).map((_, i) => (i * 31 + (i >> 8)) & 255)
    const { outcome, answer } = await ask(peer, stream, question, { halfClose: true })
    return { outcome, asked: toHex(blob(question)), answered: toHex(blob(answer)) }
  },

  serve: ({ stream }) => node.handle(stream, echo),
}

async function obey({ id, do: name, ...rest }) {
  try {
    say({ id, ok: (await COMMANDS[name](rest)) ?? null })
  } catch (error) {
    say({ id, error: error.stack ?? String(error) })
  }
}

say({ event: 'here', peer: String(node.peerId), addresses: node.getMultiaddrs().map(String) })
const commands = createInterface({ input: process.stdin })
commands.on('line', (line) => void obey(JSON.parse(line)))
commands.on('close', () => void node.stop().finally(() => process.exit(0)))
