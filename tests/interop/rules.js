// The rules between fields, which stand below the definitions in SPEC.md: values that are each in their bounds and contradict
// one another are refused. Each function takes a record as schema.js reads it.

import { before, equal, pieces, toHex } from './bytes.js'
import { ZERO } from './digest.js'
import { refuse } from './errors.js'
import { checkPacked } from './tokens.js'

const MOST_CODE = 67_108_864
const MOST_IDS = 768
const MOST_FRAME = 16842752
const MOST_READ = 4194304
const MOST_BULK = 1073741824
const MOST_SHOWN = 256

function hold(condition, detail) {
  if (!condition) refuse('inconsistent', detail)
}

const ascends = (items) => items.every((item, i) => i === 0 || before(items[i - 1], item))

const distinct = (digests) => new Set(digests.map(toHex)).size === digests.length

const sum = (numbers) => numbers.reduce((a, b) => a + b, 0)

function trajectoryGroup({ bits, ends, finish, heads, lengths, logprobs, prompt, prompt_length, rewards, spans, tokens }) {
  for (const column of [finish, spans, rewards ?? lengths, ends ?? lengths]) {
    hold(column.length === lengths.length, 'columns of different lengths')
  }
  const count = sum(lengths)
  checkPacked(prompt, prompt_length, bits)
  checkPacked(tokens, count, bits)
  hold(logprobs.length === 3 * count, 'log-probabilities for another number of tokens')

  hold(distinct(heads), 'one head named twice')
  const used = new Set(spans.flat().map((span) => span.head).filter((head) => head !== null))
  hold(used.size === heads.length - 1 && [...used].every((head) => head < heads.length), 'spans name other heads than `heads`')

  let first = 0
  lengths.forEach((length, completion) => {
    const own = spans[completion]
    own.forEach(({ start, length: size, head }, i) => {
      hold(start + size <= length, 'a span beyond its completion')
      const its = logprobs.subarray(3 * (first + start), 3 * (first + start + size))
      hold(head !== null || its.every((byte) => byte === 0), "log-probabilities on the environment's tokens")
      const last = own[i - 1]
      if (last === undefined) return
      hold(last.start + last.length <= start, 'spans that overlap or are out of order')
      hold(last.start + last.length < start || last.head !== head, 'two spans that are one')
    })
    hold(neverFalls(own, length), 'tokens under an older head than before')
    turns(own.filter(({ head }) => head === null), length, finish[completion], ends?.[completion])
    first += length
  })
}

/** The rules of turns: the environment's tokens divide a completion. Without `ends` there are none of them. */
function turns(replies, length, finish, ends) {
  if (ends === undefined) {
    hold(replies.length === 0 && (finish === 'end' || finish === 'length'), "an environment's doing, and no ends of turns")
    return
  }
  hold(ends.length === replies.length + 1, 'another number of ends than of turns')
  const last = replies.at(-1)
  hold(last === undefined || (replies[0].start > 0 && last.start + last.length < length), "the first or the last token is the environment's")
  hold(!ends.slice(0, -1).includes('end') && (ends.at(-1) === 'end') === (finish === 'end'), 'a turn after the end, or an end that is none')
}

/** Whether the policy's tokens of a completion are under heads whose index never falls; outside of all spans it is 0. */
function neverFalls(spans, length) {
  let index = 0
  let at = 0
  for (const span of [...spans, { start: length, length: 0, head: null }]) {
    if (span.start > at && index > 0) return false
    if (span.head !== null && span.head < index) return false
    index = span.head ?? index
    at = span.start + span.length
  }
  return true
}

function manifest({ contract, data, engines, model, sampling, terms, trainers, turns, verification, verifiers }) {
  hold(ascends(model.files.map((file) => file.name)), 'model files out of order')
  hold(ascends(engines.map((tolerance) => tolerance.engine)), 'engine classes out of order')
  hold(model.end_tokens.every((token) => token < model.vocab_size), 'an end token outside the vocabulary')
  hold(ascends(model.adapter?.targets ?? []), 'adapter targets out of order')
  hold(distinct(trainers), 'one trainer twice')
  hold(distinct(verifiers), 'one verifier twice')
  const voters = new Set([...trainers, ...verifiers].map(toHex))
  hold(terms.electors.every((elector) => voters.has(toHex(elector))), 'an elector from outside')
  hold(verification.policy !== 'quorum' || verification.quorum <= verifiers.length, 'a quorum of more verifiers than there are')
  hold(terms.lease_ms >= 2 * terms.heartbeat_ms, 'a lease of less than two heartbeats')
  hold(data.every((set) => set.held_out < set.rows), 'a data set that is held out whole')
  const wheels = contract.wheel ?? []
  hold(ascends(wheels.map((wheel) => wheel.name)), 'wheels out of order')
  hold(wheels.reduce((sum, wheel) => sum + Number(wheel.size), 0) <= MOST_CODE, 'wheels of too many bytes')
  hold(sampling.max_prompt + sampling.max_tokens <= model.context, 'more tokens than the context holds')
  if (turns !== null) {
    hold(model.end_tokens.includes(turns.end), 'an end of turns that ends nothing')
    hold(Math.max(turns.tokens, turns.environment) <= sampling.max_tokens, 'more tokens of a turn or the environment than in all')
    hold(contract.pure || turns.samplers.length > 0, 'replies that nobody can check, of anybody')
  }
}

function peersAnswer({ peers }) {
  hold(ascends(peers.map((place) => place.key)), 'peers out of order')
}

function roster({ members }) {
  hold(ascends(members.map((member) => member.key)), 'members out of order')
}

function receipt({ accepted, announced, refused }) {
  hold(ascends(refused.map((refusal) => refusal.reason)), 'reasons out of order')
  const ids = [accepted, announced, ...refused.map((refusal) => refusal.ids)].flatMap((column) => pieces(column, 32))
  if (ids.length > MOST_IDS) refuse('out-of-range', `${ids.length} ids`)
  hold(distinct(ids), 'one group answered twice')
}

const noneTwice = (field) => (message) => hold(distinct(pieces(message[field], 32)), 'one group named twice')

function inventoryAck({ drawn, lacking }) {
  noneTwice('lacking')({ lacking })
  noneTwice('drawn')({ drawn })
  hold(distinct([...pieces(drawn, 32), ...pieces(lacking, 32)]), 'a group that is lacking and was drawn')
}

function creditStatement({ at_ms, refused, since_ms, tokens, verified }) {
  hold(ascends(refused.map((refusal) => refusal.reason)), 'reasons out of order')
  hold(since_ms <= at_ms, 'counted since a time that is yet to come')
  hold(verified > 0 || tokens === 0, 'verified tokens of no group')
}

function weightsHead({ previous, routes, step, term, version }) {
  hold((version === 0) === equal(previous, ZERO), 'version 0, and no other, follows nothing')
  const bases = routes.map((route) => (route.base === null ? 'anchor' : toHex(route.base)))
  hold(version > 0 || (term === 1 && step === 0 && bases.includes('anchor')), 'version 0 has term 1, step 0 and an anchor')
  hold(new Set(bases).size === bases.length, 'two routes from one base')
}

function chunkTable({ after, frames, sizes }) {
  const count = sizes.length / 4
  hold(after.length === 32 * count && frames.length === 32 * count, 'columns of different lengths')
  const view = new DataView(sizes.buffer, sizes.byteOffset, sizes.byteLength)
  pieces(frames, 32).forEach((frame, i) => {
    const size = view.getUint32(4 * i, true)
    hold(size <= MOST_FRAME, 'a frame that is too large')
    hold((size === 0) === equal(frame, ZERO), 'a frame is ZERO if and only if its size is 0')
  })
}

function layout({ tensors }) {
  hold(ascends(tensors.map((tensor) => tensor.name)), 'tensors out of order')
}

function termGrant({ ballots }) {
  hold(ascends(ballots.map((ballot) => ballot.elector)), 'ballots out of order')
}

function voteAnswer({ refusal, signature }) {
  hold((refusal === null) !== (signature === null), 'a vote is given or refused')
}

function grantsAnswer({ grants }) {
  grants.forEach((shown) => termGrant(shown.grant))
  hold(grants.every(({ grant }, i) => i === 0 || grants[i - 1].grant.vote.term <= grant.vote.term), 'grants out of order')
  hold(sum(grants.map((shown) => shown.branch.length)) <= MOST_SHOWN, 'too many heads')
}

const together = (most) => ({ slices }) => hold(sum(slices.map((each) => each.length)) <= most, `more than ${most} bytes`)

export const RULES = {
  BlobRead: together(MOST_READ),
  BulkAsk: together(MOST_BULK),
  ChunkTable: chunkTable,
  CreditStatement: creditStatement,
  GrantsAnswer: grantsAnswer,
  GroupsQuestion: noneTwice('groups'),
  Inventory: noneTwice('groups'),
  InventoryAck: inventoryAck,
  Layout: layout,
  Manifest: manifest,
  PeersAnswer: peersAnswer,
  Receipt: receipt,
  RolloutRequest: ({ count, taken }) => hold(taken.length < count && taken.every((each) => each < count), 'more than was asked for'),
  Roster: roster,
  TermGrant: termGrant,
  TrajectoryGroup: trajectoryGroup,
  VoteAnswer: voteAnswer,
  WeightsHead: weightsHead,
}
