"""Graph replay of attend / append / step with short measures."""
import sys, time, torch, statistics
from htree_cuda import TreeCache, forward_cached
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention as sdpa
ROWS=[(1,32768,32,8),(1,131072,32,8),(1,1048576,16,1),(16,32768,32,8),(8,131072,32,8),(64,32768,32,8)]
if len(sys.argv)>1: ROWS=[ROWS[int(i)] for i in sys.argv[1].split(",")]
S=32
def cap(f):
    f(); torch.cuda.synchronize(); g=torch.cuda.CUDAGraph()
    with torch.cuda.graph(g): f()
    return g.replay
def t(f,before=lambda:None,n=12):
    for _ in range(3):
        before(); [f() for _ in range(S)]
    ts=[]
    for _ in range(n):
        before(); a,b=torch.cuda.Event(enable_timing=True),torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(200000)
        a.record(); [f() for _ in range(S)]; b.record(); torch.cuda.synchronize(); ts.append(a.elapsed_time(b)/S*1e3)
    return statistics.median(ts)
print(torch.cuda.get_device_name())
for B,T,H,Hk in ROWS:
    g=torch.Generator(device="cuda").manual_seed(0)
    c=TreeCache(B,T+S,Hk,128,dtype=torch.bfloat16,device="cuda")
    step=max(4096,262144//B)
    for f in range(0,T,step):
        sh=(B,min(step,T-f),Hk,128)
        c.append(torch.randn(sh,generator=g,device="cuda",dtype=torch.bfloat16),torch.randn(sh,generator=g,device="cuda",dtype=torch.bfloat16))
    q,k,v=(torch.randn(B,1,h,128,generator=g,device="cuda",dtype=torch.bfloat16) for h in (H,Hk,Hk))
    line=f"{B:3d} {T:8d} {H}/{Hk}"
    try:
        rows=q[:,0].unflatten(1,(Hk,-1)); kk,vv=(x.transpose(1,2)[:,:,:T] for x in (c.k,c.v))
        best=1e9
        for bk in (SDPBackend.CUDNN_ATTENTION,SDPBackend.FLASH_ATTENTION):
            try:
                with sdpa_kernel(bk): best=min(best,t(cap(lambda: sdpa(rows,kk,vv)),n=4))
            except RuntimeError: pass
        line+=f" dense {best:7.1f}"
    except Exception as e: line+=" dense ?"
    line+=f" append {t(cap(lambda: c.append(k,v)),lambda: c.truncate(T)):5.1f}"
    for tk in (512,64):
        a=t(cap(lambda: forward_cached(q,c,top_k_per_layer=tk)),lambda: c.truncate(T))
        s=t(cap(lambda: (c.append(k,v),forward_cached(q,c,top_k_per_layer=tk))),lambda: c.truncate(T))
        line+=f" | k{tk} attend {a:7.1f} step {s:7.1f}"
    print(line,flush=True); del c,q,k,v; torch.cuda.empty_cache()
