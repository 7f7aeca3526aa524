// Section "chain": what may follow what. A follower holds a chain of heads, the term and its leader, and the revoked keys.
// Every rule is checked before anything is changed, so that what is refused leaves the follower as it was.

import { equal, toHex } from './bytes.js'
import { ZERO } from './digest.js'
import { open, signatureHolds } from './envelope.js'
import { refuse, refuseByRule } from './errors.js'
import { decodeRecord, encodeRecord } from './schema.js'

const hasAnchor = (head) => head.record.routes.some((route) => route.base === null)

const includes = (keys, key) => keys.some((each) => equal(each, key))

/** Whether two heads, as envelope.js opens them, could not both be told by an honest signer. */
export function excludeEachOther(one, other) {
  if (!equal(one.run, other.run) || !equal(one.signer, other.signer) || one.record.term !== other.record.term) return false
  if (one.record.version === other.record.version) return !equal(one.id, other.id)
  const [first, second] = one.record.version < other.record.version ? [one, other] : [other, one]
  return second.record.version === first.record.version + 1 && !equal(second.record.previous, first.id)
}

export class Follower {
  /** `sealedManifest` names the run; `link` is a record as link.js reads it, or null. */
  constructor(sealedManifest, link = null) {
    const manifest = open(sealedManifest, 'manifest', ZERO)
    this.run = manifest.id
    this.manifest = manifest.record
    if (link !== null && !equal(link.run, this.run)) refuse('wrong-run', 'a link to another run')
    this.link = link
    this.heads = []
    this.term = 1
    this.leader = this.manifest.trainers[0]
    this.grants = []
    this.contested = false
    this.revoked = new Set()
  }

  get tip() {
    return this.heads.at(-1) ?? null
  }

  /** Nobody may lead it further until a grant. */
  get holding() {
    return this.contested || this.isRevoked(this.leader)
  }

  isRevoked(key) {
    return this.revoked.has(toHex(key))
  }

  isLinked(head) {
    return this.link !== null && equal(head.id, this.link.head)
  }

  openHead(sealed) {
    return open(sealed, 'head', this.run)
  }

  /** Rule 1: the head belongs to the run. */
  checkBelongs(head) {
    if (!includes(this.manifest.trainers, head.signer)) refuseByRule('not-trainer', 'signed by none of the trainers')
    if (!equal(head.record.layout, this.manifest.model.layout)) refuseByRule('wrong-layout', 'another layout')
  }

  hearHead(sealed) {
    const head = this.openHead(sealed)
    this.checkBelongs(head)
    if (this.heads.some((held) => equal(held.id, head.id))) return
    if (this.link !== null && this.heads.length === 0) {
      this.startAtLink(head)
      return
    }
    const { term } = head.record
    if (term > this.term) refuseByRule('missing-grant', `term ${term}`)
    const excluded = this.heads.find((held) => excludeEachOther(held, head))
    if (excluded !== undefined) {
      this.convict(excluded, head)
      return
    }
    if (term < this.term) refuseByRule('old-term', `term ${term}`)
    if (this.holding) refuseByRule('revoked', 'nobody leads this term')
    if (!equal(head.signer, this.leader)) refuseByRule('not-leader', 'not signed by the leader')
    if (this.tip === null) this.checkFirst(head)
    else this.checkNext(head)
    this.heads.push(head)
  }

  /** Rule 3: the link's own head is the first, and sets the term and its leader. */
  startAtLink(head) {
    const { term, version } = head.record
    if (term < this.link.term || (term === this.link.term && version < this.link.version)) {
      refuseByRule('below-link', 'older than the head of the link')
    }
    if (!this.isLinked(head) || term !== this.link.term || version !== this.link.version) {
      refuseByRule('gap', 'not the head of the link')
    }
    this.heads = [head]
    this.term = term
    this.leader = head.signer
  }

  /** Rule 7. */
  checkFirst(head) {
    if (head.record.version !== 0) refuseByRule('gap', 'nothing is held yet')
    if (!equal(head.record.root, this.manifest.model.root)) refuseByRule('wrong-root', "not the manifest's root")
  }

  /** Rules 8 and 9. */
  checkNext(head) {
    const { version, previous, step, term } = head.record
    const tip = this.tip.record
    if (version <= tip.version) refuseByRule('rollback', `version ${version}`)
    if (version > tip.version + 1) refuseByRule('gap', `version ${version}`)
    if (!equal(previous, this.tip.id)) refuseByRule('wrong-base', 'does not follow the tip')
    if (step < tip.step) refuseByRule('wrong-step', `step ${step}`)
    if (term > tip.term && !hasAnchor(head)) refuseByRule('no-anchor', 'the first head of a term has an anchor')
  }

  /** Two sealed heads that exclude each other, heard from elsewhere. */
  hearProof(sealedOne, sealedOther) {
    const one = this.openHead(sealedOne)
    const other = this.openHead(sealedOther)
    this.checkBelongs(one)
    this.checkBelongs(other)
    if (!excludeEachOther(one, other)) refuseByRule('no-proof', 'the two do not exclude each other')
    this.convict(one, other)
  }

  convict(one, other) {
    this.revoked.add(toHex(one.signer))
    if (!equal(one.signer, this.leader) || one.record.term !== this.term) return
    const lowest = Math.min(one.record.version, other.record.version)
    this.heads = this.heads.filter((held) =>
      held.record.term !== this.term || held.record.version < lowest || this.isLinked(held))
  }

  /** A grant, in canonical bytes, with the sealed heads that lead to its base where that is not held. */
  hearGrant(bytes, sealedBranch = []) {
    const grant = this.openGrant(bytes)
    const { vote } = grant.record
    const rivals = this.grants.filter((held) => held.record.vote.term === vote.term)
    if (rivals.some((held) => equal(held.vote, grant.vote))) refuseByRule('old-term', 'it is held')
    if (rivals.length > 0) {
      this.contest(grant, rivals, sealedBranch.map((each) => this.openHead(each)))
      return
    }
    if (vote.term <= this.term) refuseByRule('old-term', `term ${vote.term}`)
    if (vote.term > this.term + 1) refuseByRule('missing-grant', `term ${vote.term}`)
    this.heads = this.headsTo(vote.base, sealedBranch.map((each) => this.openHead(each)))
    this.term = vote.term
    this.leader = vote.leader
    this.grants.push(grant)
    this.contested = false
  }

  /** Whether two trainers are the only electors. */
  get takesTurns() {
    const { trainers, terms } = this.manifest
    return trainers.length === 2 && terms.electors.length === 2 && terms.electors.every((key) => includes(trainers, key))
  }

  electorsOf(term) {
    const { trainers, terms } = this.manifest
    return this.takesTurns ? [trainers[(Number(term) + 1) % 2]] : terms.electors
  }

  /** The record of a grant that holds by itself, its electors, and the bytes of its vote. */
  openGrant(bytes) {
    const record = decodeRecord('TermGrant', bytes)
    const body = encodeRecord('TermVote', record.vote)
    for (const { elector, signature } of record.ballots) {
      if (!signatureHolds({ kind: 'vote', run: this.run, signer: elector, body, signature })) {
        refuse('bad-signature', 'a ballot that does not verify')
      }
    }
    const electors = this.electorsOf(record.vote.term)
    const leaders = this.takesTurns ? electors : this.manifest.trainers
    const voters = record.ballots.map((ballot) => ballot.elector)
    if (!voters.every((voter) => includes(electors, voter))) refuseByRule('not-elector', 'a ballot of no elector')
    if (2 * voters.length <= electors.length) refuseByRule('no-majority', `${voters.length} of ${electors.length}`)
    if (!includes(leaders, record.vote.leader)) refuseByRule('not-trainer', 'the leader is no trainer, or it is not its turn')
    return { record, voters, vote: body }
  }

  /** Two grants for one term: who signed both is revoked. Of the current term, only what both would go on from stands. */
  contest(grant, rivals, branch) {
    const current = grant.record.vote.term === this.term
    const shown = current ? this.headsTo(grant.record.vote.base, branch) : []
    for (const voter of grant.voters) {
      if (rivals.some((held) => includes(held.voters, voter))) this.revoked.add(toHex(voter))
    }
    this.grants.push(grant)
    if (!current) return
    this.heads = this.heads.filter((held) => held.record.term < this.term && shown.some((other) => equal(other.id, held.id)))
    this.contested = true
  }

  /** The heads up to a base, held or shown. */
  headsTo(base, branch) {
    const index = this.heads.findIndex((held) => equal(held.id, base))
    return index >= 0 ? this.heads.slice(0, index + 1) : this.graft(base, branch)
  }

  /** The heads that are held once `branch` leads from one of them to the base. */
  graft(base, branch) {
    if (branch.length === 0 || !equal(branch.at(-1).id, base)) refuseByRule('gap', 'the base is not shown')
    const root = this.heads.findIndex((held) => equal(held.id, branch[0].record.previous))
    const fromNothing = this.heads.length === 0 && this.link === null && branch[0].record.version === 0
    if (root < 0 && !fromNothing) refuseByRule('gap', 'the branch leads from no head that is held')
    const kept = this.heads.slice(0, root + 1)
    for (const head of branch) {
      this.checkBelongs(head)
      const last = kept.at(-1)
      if (last === undefined) this.checkOpens(head)
      else if (!follows(last, head) || !(goesOn(last, head) || this.enters(last, head))) {
        refuseByRule('wrong-base', 'a branch that does not hold together')
      }
      kept.push(head)
    }
    return kept
  }

  /** A branch from nothing: version 0 of this run; the first term is led by the first trainer. */
  checkOpens(head) {
    this.checkFirst(head)
    if (!equal(head.signer, this.manifest.trainers[0])) refuseByRule('not-leader', 'version 0 by another key')
  }

  /** Whether a head of a branch enters a term at the base of a grant that was taken for it. */
  enters(last, head) {
    return this.grants.some(({ record: { vote } }) =>
      vote.term === head.record.term && equal(vote.leader, head.signer) && equal(vote.base, last.id))
  }
}

/** Whether a head of a branch follows the one before it. */
function follows(last, head) {
  return equal(head.record.previous, last.id)
    && head.record.version === last.record.version + 1
    && head.record.step >= last.record.step
}

/** Whether it does so in the same term and by the same signer. */
function goesOn(last, head) {
  return head.record.term === last.record.term && equal(head.signer, last.signer)
}
